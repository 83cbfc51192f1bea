"""The command `twinscan`, and the shared parts of all command lines."""
