"""Runs the commands of the page."""

import shlex

from parity_tests.report.pairs_command import main


def shell(line: str) -> None:
    """Runs `twinscan parity`."""
    _, _, *arguments = shlex.split(line)
    assert main(arguments, "twinscan parity") == 0
