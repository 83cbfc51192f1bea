"""`python -m train`: train a language model on a text."""

if __name__ == "__main__":
    from twinscan.heartbeat import IMPORTING, doing, heartbeat
    from twinscan.interrupted import exit_at_once

    exit_at_once("python -m train")
    with heartbeat():
        with doing(IMPORTING):
            from twinscan.command_line import run_module

        run_module("train.command.train", prog="python -m train")
