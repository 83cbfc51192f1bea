"""Checks of the arguments of public functions, with error messages that say what to do."""
