"""The training loop: steps, evaluations, checkpoints, and the ways in which a run ends early."""

import signal
import time
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console

from train.hosts import of_all
from train.interruption import Interruption
from train.monitor import Monitor
from train.run import Run
from train.step import Measures, Trainer, TrainState
from train.windows import Batches, Windows
from twinscan.command_line import NonFiniteError, StoppedError

STEPS_PER_CALL = 10
"""At most so many steps of the optimiser cost one dispatch."""
SECONDS_PER_CALL = 1.0
"""Of slow steps a call has fewer: a signal waits for its end."""


class Call(NamedTuple):
    """The steps of one dispatch."""

    start: int
    stop: int
    measures: Measures


def train(run: Run, trainer: Trainer, parts: dict[str, Windows], console: Console) -> TrainState:
    """Train to the config's last step, from the newest checkpoint if there is one.

    Raises:
        NonFiniteError: too many steps in a row, or the weights, are not finite. The newest
            checkpoint is from before.
        StoppedError: SIGTERM or Ctrl-C. The newest checkpoint is of the last step that was made.

    """
    config = run.config
    state = run.restore(trainer) if run.checkpoints.steps else trainer.initial_state()
    step = int(state.step)
    sampler = partial(Batches, batch_size=config.batch_size)
    training = sampler(parts["train"], seed=config.seed)
    evaluation = {
        name: np.stack([sampler(part, seed=config.seed + 1)[i] for i in range(config.eval_batches)])
        for name, part in parts.items()
    }

    steps_per_call, call = 1, None
    monitor = Monitor(run, trainer, console, step, lambda step: training.starts(step).tolist())
    with monitor, Interruption() as interruption:
        while True:
            stopping, steps_per_call = decided(interruption.signal, steps_per_call)
            is_last = step == config.num_steps
            is_due = step % config.eval_every == 0 or is_last
            if is_due or stopping:
                record(run, trainer, monitor, state, call)
                call = None
                keep(run, trainer, monitor, state, evaluation if is_due else {})
            if is_last or stopping:
                run.checkpoints.close()
                stopping, _ = decided(interruption.signal, steps_per_call)
                if stopping:
                    raise StoppedError(stopping, f"the run is saved at step {step} in {run.folder}")
                return state
            call_time = time.perf_counter()
            next_evaluation = step - step % config.eval_every + config.eval_every
            stop = min(step + steps_per_call, next_evaluation, config.num_steps)
            chunk = [training.starts(i) for i in range(step, stop)]
            chunk += chunk[-1:] * (STEPS_PER_CALL - len(chunk))  # one program for every call
            tokens = trainer.put_windows(training.windows, np.stack(chunk))
            state, measures = trainer.steps(state, tokens, stop - step)
            monitor.called(stop, time.perf_counter() - call_time)
            before, call = call, Call(step, stop, measures)
            record(run, trainer, monitor, state, before)  # while the device works on this call
            steps_per_call = adapted(steps_per_call, time.perf_counter() - call_time)
            step = stop


def record(
    run: Run, trainer: Trainer, monitor: Monitor, state: TrainState, call: Call | None
) -> None:
    """Log what a call measured; raise where it leaves no hope for the steps after it."""
    skipped = [] if call is None else monitor.record(*call)
    most = run.config.max_skipped
    for step in skipped:
        if monitor.skipped_in_a_row(step) >= most:
            raise not_finite(run, step, f"the losses or gradients of {most} steps in a row are")
    if skipped and not trainer.is_finite(state):
        raise not_finite(run, skipped[0], "the weights are")


def keep(
    run: Run,
    trainer: Trainer,
    monitor: Monitor,
    state: TrainState,
    evaluation: dict[str, np.ndarray],
) -> None:
    """Evaluate the state, write what comes out, and write a checkpoint."""
    step = int(state.step)
    losses = {
        name: float(trainer.evaluate(state.averaged_params, batches).mean())
        for name, batches in evaluation.items()
    }
    if not np.isfinite([*losses.values()]).all() or not trainer.is_finite(state):
        raise not_finite(run, step, "the weights or their losses are")
    if losses:
        monitor.evaluated(step, losses)
    run.checkpoints.save(step, state, losses.get("val"), monitor.unlogged)


def decided(
    received: signal.Signals | None, steps_per_call: int
) -> tuple[signal.Signals | None, int]:
    """The signal that any process has received, and the first one's steps."""
    signals, steps = of_all([received or 0, steps_per_call]).T
    stopping = int(signals.max())
    return signal.Signals(stopping) if stopping else None, int(steps[0])


def adapted(steps_per_call: int, seconds: float) -> int:
    """Twice as many steps after a quick call, half as many after a slow one."""
    if seconds < SECONDS_PER_CALL / 2:
        return min(2 * steps_per_call, STEPS_PER_CALL)
    return max(steps_per_call // 2, 1) if seconds > SECONDS_PER_CALL else steps_per_call


def not_finite(run: Run, step: int, what: str) -> NonFiniteError:
    """The end of a run, with the checkpoint that is left."""
    run.checkpoints.close()
    return NonFiniteError(
        f"step {step}: {what} not finite; the last finite checkpoint is of step "
        f"{run.checkpoints.latest_step}, in {run.folder} (a new run may need a lower "
        "--optimizer.learning-rate, or --optimizer.clip-norm)"
    )
