"""The command `twinscan`, and what all command lines of the distribution share."""
