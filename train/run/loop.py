"""The training loop: steps, evaluations, checkpoints, and early ends of a run."""

import signal
import time
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console

from train.data.windows import Batches, Windows
from train.process.hosts import gather_all
from train.process.interruption import Interruption
from train.run.folder import Run
from train.run.monitor import Monitor
from train.trainer.step import Measures, Trainer, TrainState
from twinscan.command_line import NonFiniteError, StoppedError
from twinscan.heartbeat import doing

STEPS_PER_CALL = 10
"""Largest number of optimizer steps in a call."""
SECONDS_PER_CALL = 1.0
"""Slower calls get fewer steps, because a signal waits for the end of a call."""


class Call(NamedTuple):
    """The steps of one call of the compiled program."""

    start: int
    stop: int
    measures: Measures


def train(
    run: Run,
    trainer: Trainer,
    parts: dict[str, Windows],
    console: Console,
    initial: TrainState | None = None,
) -> TrainState:
    """Trains to the last step of the config, from the newest checkpoint if there is one.

    Without a checkpoint, the run starts from `initial`, which a step donates. None: random weights.

    Raises:
        NonFiniteError: too many steps in a row, or the weights, are not finite. The newest
            checkpoint is from an earlier step.
        StoppedError: SIGTERM or Ctrl-C stopped the run, after it saved its last step.

    """
    # Batches depend on the step alone, so a resumed run continues with the same ones.
    config = run.config
    is_new = not run.checkpoints.steps
    with doing("initializing the weights"):
        if not is_new:
            state = run.restore(trainer)
        else:
            state = trainer.initial_state() if initial is None else initial
    step = int(state.step)
    source = "scratch" if config.init is None else f"the weights of {config.init}"
    start = f"no checkpoint yet: starting from {source}" if is_new else f"resumed at step {step:,}"
    console.print(f"{start}, in {run.folder}", soft_wrap=True)
    sampler = partial(Batches, batch_size=config.batch_size)
    training = sampler(parts["train"], seed=config.seed)
    evaluation = {
        name: np.stack([sampler(part, seed=config.seed + 1)[i] for i in range(config.eval_batches)])
        for name, part in parts.items()
    }

    steps_per_call, call = 1, None
    monitor = Monitor(run, trainer, console, step, lambda step: training.starts(step).tolist())
    with monitor, Interruption() as interruption, doing(monitor.describe):
        # A run that is killed in its first minute is resumed, too.
        if is_new:
            evaluate_and_save(run, trainer, monitor, state, {})
        while True:
            # All processes must stop, evaluate, save and step together.
            stopping, steps_per_call, is_late = agree(
                interruption.signal, steps_per_call, run.checkpoints.is_late
            )
            is_last = step == config.num_steps
            is_due = step % config.eval_every == 0 or is_last
            if is_due or stopping or is_late:
                log_call(run, trainer, monitor, state, call)
                call = None
                evaluate_and_save(run, trainer, monitor, state, evaluation if is_due else {})
            if is_last or stopping:
                with doing(f"writing the checkpoint of step {step:,}"):
                    run.checkpoints.close()
                # A signal may also have come during the last save.
                stopping, *_ = agree(interruption.signal, steps_per_call)
                if stopping:
                    raise StoppedError(stopping, f"the run is saved at step {step} in {run.folder}")
                return state
            # Call the program with as many steps as there are until the next evaluation.
            call_time = time.perf_counter()
            next_evaluation = step - step % config.eval_every + config.eval_every
            stop = min(step + steps_per_call, next_evaluation, config.num_steps)
            chunk = [training.starts(i) for i in range(step, stop)]
            chunk += chunk[-1:] * (STEPS_PER_CALL - len(chunk))  # one shape, one program
            tokens = trainer.put_windows(training.windows, np.stack(chunk))
            with monitor.dispatching(stop):
                state, measures = trainer.steps(state, tokens, stop - step)
            before, call = call, Call(step, stop, measures)
            # Log the call before this one while the device works.
            log_call(run, trainer, monitor, state, before)
            steps_per_call = next_call_size(steps_per_call, time.perf_counter() - call_time)
            step = stop


def log_call(
    run: Run, trainer: Trainer, monitor: Monitor, state: TrainState, call: Call | None
) -> None:
    """Logs the measures of a call, and raises a NonFiniteError if further steps are pointless."""
    skipped = [] if call is None else monitor.record(*call)
    most = run.config.max_skipped
    for step in skipped:
        if monitor.skipped_in_a_row(step) >= most:
            raise not_finite(run, step, f"the losses or gradients of {most} steps in a row are")
    if skipped and not trainer.is_finite(state):
        raise not_finite(run, skipped[0], "the weights are")


def evaluate_and_save(
    run: Run,
    trainer: Trainer,
    monitor: Monitor,
    state: TrainState,
    evaluation: dict[str, np.ndarray],
) -> None:
    """Evaluates the state, logs the losses, and writes a checkpoint."""
    step = int(state.step)
    losses = {}
    for name, batches in evaluation.items():
        with doing(f"evaluating step {step:,} on the part {name}"):
            losses[name] = float(trainer.evaluate(state.averaged_params, batches).mean())
    if not np.isfinite([*losses.values()]).all() or not trainer.is_finite(state):
        raise not_finite(run, step, "the weights or their losses are")
    if losses:
        monitor.log_evaluation(step, losses)
    with doing(f"writing the checkpoint of step {step:,}"):
        run.checkpoints.save(step, state, losses.get("val"), monitor.unlogged)
    monitor.pause()


def agree(
    received: signal.Signals | None, steps_per_call: int, is_late: bool = False
) -> tuple[signal.Signals | None, int, bool]:
    """The signal that any process has received.

    The call size, and whether the last checkpoint is too old, are those of the first process.
    """
    signals, steps, late = gather_all([received or 0, steps_per_call, is_late]).T
    stopping = int(signals.max())
    return signal.Signals(stopping) if stopping else None, int(steps[0]), bool(late[0])


def next_call_size(steps_per_call: int, seconds: float) -> int:
    """Twice as many steps after a quick call, half as many after a slow one."""
    if seconds < SECONDS_PER_CALL / 2:
        return min(2 * steps_per_call, STEPS_PER_CALL)
    return max(steps_per_call // 2, 1) if seconds > SECONDS_PER_CALL else steps_per_call


def not_finite(run: Run, step: int, what: str) -> NonFiniteError:
    """Closes the checkpoints, and returns the error that names the last one."""
    run.checkpoints.close()
    return NonFiniteError(
        f"step {step}: {what} not finite; the last finite checkpoint is of step "
        f"{run.checkpoints.latest_step}, in {run.folder} (a new run may need a lower "
        "--optimizer.learning-rate, or --optimizer.clip-norm)"
    )
