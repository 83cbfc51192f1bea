"""`python -m parity_tests`: compare every model of this package with its PyTorch twin."""

import sys

from parity_tests.report.command import PROG, main
from twinscan.command_line import run_command

if __name__ == "__main__":
    run_command(main, sys.argv[1:], PROG)
