"""Runs the commands of the page."""

import shlex
from importlib import import_module

from twinscan.__main__ import COMMANDS


def shell(line: str) -> None:
    """Runs a command in this process."""
    _, command, *arguments = shlex.split(line)
    import_module(COMMANDS[command][0]).main(arguments, f"twinscan {command}")
