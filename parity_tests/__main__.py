"""`python -m parity_tests`: compare every model of this package with its PyTorch twin."""

from twinscan.own_packages import pin

if __name__ == "__main__":
    pin("jax_models", "torch_ref")
    from twinscan.command_line import run_module

    run_module("parity_tests.report.command", prog="python -m parity_tests")
