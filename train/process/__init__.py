"""What keeps a command, its files and its hosts safe, whatever it computes.

- `files`: files that are written completely or not at all; `digest`: what identifies bytes and
  arrays.
- `hosts`: the processes of a run on several hosts; `interruption`: SIGTERM and Ctrl-C.
"""
