"""The training loop: steps, evaluations, checkpoints, and the ways in which a run ends early."""

import time
from functools import partial

import numpy as np
from jax.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.interruption import Interruption
from train.run import Run
from train.step import Trainer, TrainState
from train.text import Windows, batches
from twinscan.command_line import NonFiniteError, StoppedError

STEPS_PER_CALL = 10
"""At most so many steps of the optimiser cost one dispatch."""
SECONDS_PER_CALL = 1.0
"""Of slow steps a call has fewer: a signal waits for its end."""


def train(run: Run, trainer: Trainer, parts: dict[str, Windows], console: Console) -> TrainState:
    """Train to the config's last step, from the newest checkpoint if there is one.

    Raises:
        NonFiniteError: a loss or a weight is not finite. The newest checkpoint is from before.
        StoppedError: SIGTERM or Ctrl-C. The newest checkpoint is of the last step.

    """
    config = run.config
    state = run.restore(trainer) if run.checkpoints.steps else trainer.initial_state()
    sampler = partial(batches, batch_size=config.batch_size)
    training = sampler(parts["train"], seed=config.seed)
    evaluation = {
        name: np.stack([sampler(part, seed=config.seed + 1)[i] for i in range(config.eval_batches)])
        for name, part in parts.items()
    }
    step, start_time = int(state.step), time.perf_counter()
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    bar = progress.add_task("", total=config.num_steps, completed=step)
    console.print(f"{'step':>7}  {'train loss':>10}  {'val loss':>8}  {'seconds':>7}")
    called = (step, np.zeros(0))
    steps_per_call = 1
    with progress, Interruption() as interruption:
        while True:
            is_due = step % config.eval_every == 0 or step == config.num_steps
            if is_due or interruption.signal:
                check_losses(run, *called)
                losses = evaluated(trainer, state, evaluation) if is_due else {}
                if not np.isfinite([*losses.values()]).all() or not trainer.is_finite(state):
                    raise not_finite(run, step, "the weights or their losses are")
                if is_due:
                    seconds = time.perf_counter() - start_time
                    run.log({"step": step, **losses, "seconds": round(seconds, 2)})
                    console.print(
                        f"{step:7d}  {losses['train']:10.4f}  {losses['val']:8.4f}  {seconds:7.1f}"
                    )
                run.checkpoints.save(step, state, losses.get("val"))
            if step == config.num_steps:
                break
            if interruption.signal:
                run.checkpoints.close()
                raise StoppedError(interruption.signal, f"step {step} is kept in {run.folder}")
            call_time = time.perf_counter()
            next_evaluation = step - step % config.eval_every + config.eval_every
            stop = min(step + steps_per_call, next_evaluation, config.num_steps)
            chunk = [training[i] for i in range(step, stop)]
            chunk += chunk[-1:] * (STEPS_PER_CALL - len(chunk))  # one program for every call
            state, losses = trainer.steps(state, trainer.put(np.stack(chunk)), stop - step)
            before, called = called, (step, losses)
            check_losses(run, *before)  # while the device works on this call
            steps_per_call = adapted(steps_per_call, time.perf_counter() - call_time)
            step = stop
            progress.update(bar, completed=step)
    run.checkpoints.close()
    return state


def evaluated(
    trainer: Trainer, state: TrainState, evaluation: dict[str, np.ndarray]
) -> dict[str, float]:
    """The mean loss over the batches of each part."""
    return {
        name: float(trainer.evaluate(state.params, batches).mean())
        for name, batches in evaluation.items()
    }


def adapted(steps_per_call: int, seconds: float) -> int:
    """Twice as many steps after a quick call, half as many after a slow one."""
    if seconds < SECONDS_PER_CALL / 2:
        return min(2 * steps_per_call, STEPS_PER_CALL)
    return max(steps_per_call // 2, 1) if seconds > SECONDS_PER_CALL else steps_per_call


def check_losses(run: Run, start: int, losses: ArrayLike) -> None:
    """Raise where a loss of the steps from `start` on is not finite."""
    for step, loss in enumerate(np.asarray(losses), start):
        if not np.isfinite(loss):
            raise not_finite(run, step, "the loss is")


def not_finite(run: Run, step: int, what: str) -> NonFiniteError:
    """The end of a run, with the checkpoint that is left."""
    run.checkpoints.close()
    return NonFiniteError(
        f"step {step}: {what} not finite; the last finite checkpoint is of step "
        f"{run.checkpoints.latest_step}, in {run.folder} (a new run may need a lower "
        "--optimizer.learning-rate, or --optimizer.clip-norm)"
    )
