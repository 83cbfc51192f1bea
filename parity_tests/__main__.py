"""`python -m parity_tests`: compare every model of this package with its PyTorch twin."""

from twinscan.command_line import run_module

if __name__ == "__main__":
    run_module("parity_tests.report.command", prog="python -m parity_tests")
