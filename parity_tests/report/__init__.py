"""The command, and how its measurements are printed and written."""
