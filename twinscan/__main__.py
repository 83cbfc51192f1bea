"""The command `twinscan`, which runs all other commands."""

import signal
import sys
from collections.abc import Sequence

from twinscan.heartbeat import IMPORTING, doing, heartbeat
from twinscan.interrupted import exit_at_once, until_the_pipe_is_closed
from twinscan.own_packages import pin

COMMANDS = {
    "train": ("train.command.train", "train a language model on a text"),
    "generate": ("train.command.generate", "continue a prompt with a run's model"),
    "convert": (
        "train.command.convert",
        "write a checkpoint or a run in the layout of another package",
    ),
    "evaluate": ("train.command.evaluate", "compute the loss of a run's model on a text"),
    "export": ("train.command.export", "write a run's weights for its PyTorch twin"),
    "parity": ("parity_tests.report.command", "compare every JAX layer with its PyTorch twin"),
}
USAGE = "\n".join(
    [
        "usage: twinscan COMMAND [options]",
        "",
        *(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()),
        "",
        "twinscan COMMAND --help lists the options; twinscan --version prints the version.",
    ]
)


def dispatch(args: Sequence[str], prog: str) -> None:
    """Runs the command that the first argument names, with the other arguments."""
    from twinscan.command_line import CommandLineError, did_you_mean, run_module

    name, *rest = args
    if name not in COMMANDS:
        hint = did_you_mean(name, {known: known for known in (*COMMANDS, "--help", "--version")})
        raise CommandLineError(f"expected one of {', '.join(COMMANDS)}, got {name}{hint}")
    if name != "train":  # train handles Ctrl-C itself while it runs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    module, _ = COMMANDS[name]
    pin(module.partition(".")[0])
    run_module(module, rest, f"{prog} {name}")


def main() -> None:
    """The entry point of the console script."""
    args = sys.argv[1:] or ["--help"]
    if args[0] in ("-h", "--help"):
        with until_the_pipe_is_closed():
            print(USAGE)
        return
    exit_at_once("twinscan")
    pin("jax_models", "torch_ref")
    try:
        if args == ["--version"]:
            from jax_models import __version__

            print(f"twinscan {__version__}")
            return
        with heartbeat():
            with doing(IMPORTING):
                from twinscan.command_line import run_command

            run_command(dispatch, args, "twinscan")
    except ModuleNotFoundError as error:
        extra = "torch" if args[0] == "parity" else "train"
        sys.exit(
            f"twinscan: error: {error.name} is not installed: "
            f"run pip install '.[{extra}]' in a clone of twinscan"
        )


if __name__ == "__main__":
    main()
