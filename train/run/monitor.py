"""Shows and logs the progress of a training run."""

import contextlib
import datetime
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from train.run.config import TrainConfig
from train.run.folder import Run
from train.trainer.optimizer import build_schedule
from train.trainer.step import Measures, Trainer
from twinscan.command_line import CommandLineError
from twinscan.heartbeat import doing, line_printed

PEAK_FLOPS = {
    "TPU v4": (275e12, 275e12 / 6),
    "TPU v5 lite": (197e12, 197e12 / 6),
    "TPU v5e": (197e12, 197e12 / 6),
    "TPU v5": (459e12, 459e12 / 6),
    "TPU v6": (918e12, 918e12 / 6),
    "NVIDIA A100": (312e12, 19.5e12),
    "NVIDIA H100": (989e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 51e12),
    "NVIDIA H200": (989e12, 67e12),
}
"""FLOP/s of dense products in bfloat16 and in float32, by the start of a device's kind.

From cloud.google.com/tpu/docs/system-architecture-tpu-vm and NVIDIA's data sheets. The models keep
the precision of float32, for which a TPU makes six products in bfloat16.
"""
LINES_PER_RUN = 10
"""Smallest number of lines with a loss in a run, if it has as many steps."""
DRAWING_SHARE = 0.01
"""Largest share of the time that goes into redrawing the curve."""
FIRST_DRAWING = 0.3
"""Assumed seconds for a drawing, until one has been timed."""


def peak_flops(kind: str, dtype: str) -> float | None:
    """The peak FLOP/s of a device, or None if unknown."""
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)][dtype == "float32"] if known else None


class Monitor:
    """Logs a run into its `metrics.jsonl`, and shows it on the console.

    A step is identified by the number of steps before it. `rows(step)` lists the places in the text
    where the windows of the step begin.
    """

    def __init__(
        self,
        run: Run,
        trainer: Trainer,
        console: Console,
        step: int,
        rows: Callable[[int], list[int]],
    ):
        # The speed is shown as a share of the peak, if the device is known and all parameters are
        # trained. A frozen parameter needs fewer operations, and how many depends on its place.
        config, devices = run.config, trainer.mesh.devices
        kind = devices.flat[0].device_kind
        num_params = sum(param.size for param in jax.tree.leaves(trainer.abstract_params))
        has_frozen = bool(trainer.trainable.frozen)
        device_peak = None if has_frozen else peak_flops(kind, config.dtype)
        # Continue the counts of the process that the run was resumed from.
        self.skipped = {line["step"] for line in run.metrics("skipped") if line["step"] < step}
        """The steps that were not applied, because they were not finite."""
        self._run, self._console, self._rows = run, console, rows
        self._peak = None if device_peak is None else devices.size * device_peak
        self._flops_per_token = 6 * num_params
        """The usual estimate, because XLA's own count includes the body of a loop only once."""
        self._schedule = jax.jit(build_schedule(config.optimizer, config.num_steps))
        self._first_step, self._is_compiled = step, False
        self._steps_done = step
        self._log_every = min(config.log_every, -(-config.num_steps // LINES_PER_RUN))
        self.unlogged = run.checkpoints.unlogged(step)
        """The losses since the last line, including those of a process that a signal stopped."""
        self._gradient_norm = self._seconds = 0.0
        """The gradient norm of the last applied step, and the time since the last line."""
        self._other_losses: dict[str, float] = {}
        """The losses of the last applied step in addition to that of the tokens."""
        self._num_steps = 0
        self._start = self._training_start = self._last_drawing = time.perf_counter()
        self._last_call_end: float | None = None
        """The end of the last recorded call; None after an evaluation."""
        self._drawing_seconds = FIRST_DRAWING
        self._writer = open_writer(run) if config.tensorboard else None
        # The first lines describe the run and name the columns.
        before = run.last_num_devices
        run.log({"start": step, "device": kind, "devices": devices.size, "parameters": num_params})
        trained, _ = trainer.trainable.split(trainer.abstract_params)
        num_trained = sum(param.size for param in jax.tree.leaves(trained))
        note = f", {num_trained:,} of them trained" if has_frozen else ""
        self._print(f"{devices.size} × {kind}, {num_params:,} parameters{note}")
        if before not in (None, devices.size):
            self._print(f"resumed from {before} devices: the results are equal up to rounding")
        self._print(
            f"{'step':>7}  {'loss':>7}  {'rate':>8}  {'gradient':>8}  {'tokens/s':>10}  "
            f"{'MFU    ' if self._peak else ''}left"
        )
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=config.num_steps, completed=step)

    def __enter__(self) -> "Monitor":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._writer is not None:
            self._writer.close()

    def describe(self) -> str:
        """The step that the run has reached."""
        return f"training: step {self._steps_done:,} of {self._run.config.num_steps:,}"

    def pause(self) -> None:
        """Leaves the time until the next call out of the speed."""
        self._last_call_end = None

    @contextlib.contextmanager
    def dispatching(self, stop: int) -> Iterator[None]:
        """Shows that the steps before `stop` are dispatched in this context.

        The first time, the step is compiled, which may take long and is announced.
        """
        start = time.perf_counter()
        if self._is_compiled:
            yield
        else:
            self._print("compiling the training step")
            with doing("compiling the training step"):
                yield
            self._is_compiled = True
            self._training_start = self._last_call_end = time.perf_counter()
            seconds = self._training_start - start
            self._run.log({"compile_seconds": round(seconds, 2)})
            self._print(f"compiled in {seconds:.1f} s")
        if self._last_call_end is None:
            self._last_call_end = start
        self._progress.update(self._bar, completed=stop)

    def record(self, start: int, stop: int, measures: Measures) -> list[int]:
        """Waits for the steps of a call, logs them, and returns those that were not applied."""
        measures = jax.tree.map(np.asarray, measures)
        now = time.perf_counter()
        assert self._last_call_end is not None
        self._steps_done = stop
        seconds, self._last_call_end = (now - self._last_call_end) / (stop - start), now
        config, skipped = self._run.config, []
        for i, step in enumerate(range(start, stop)):
            loss, norm = float(measures.loss[i]), float(measures.gradient_norm[i])
            self._seconds += seconds
            self._num_steps += 1
            if math.isfinite(loss) and math.isfinite(norm):
                self.unlogged.append(loss)
                self._gradient_norm = norm
                others = measures.other_losses.items()
                self._other_losses = {name: float(values[i]) for name, values in others}
            else:
                skipped.append(step)
                self._log_skipped(step, loss, norm)
            steps_done = step + 1
            is_due = steps_done % self._log_every == 0 or steps_done % config.eval_every == 0
            if is_due or steps_done == config.num_steps:
                self._log_line(steps_done)
        return skipped

    def skipped_in_a_row(self, step: int) -> int:
        """The number of consecutive steps up to this one that were not applied."""
        return next(n for n in itertools.count() if step - n not in self.skipped)

    def log_evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Logs the losses of an evaluation, and redraws the curve if that costs little time."""
        now = time.perf_counter()
        self._log({"step": step, **losses, "seconds": round(now - self._start, 2)})
        self._print(f"{step:7d}  train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if DRAWING_SHARE * (now - self._last_drawing) > self._drawing_seconds:
            self._run.draw_curve()
            self._last_drawing = time.perf_counter()
            self._drawing_seconds = self._last_drawing - now

    def _log_skipped(self, step: int, loss: float, norm: float) -> None:
        self.skipped.add(step)
        self._run.log({"step": step, "skipped": True, "rows": self._rows(step)})
        self._print(
            f"{step:7d}  not applied: its loss is {loss:.4g}, its gradient's norm {norm:.4g} "
            f"({self.skipped_in_a_row(step)} in a row)"
        )

    def _log_line(self, step: int) -> None:
        """Logs the steps since the last line, if any of them was applied."""
        config = self._run.config
        num_tokens = self._num_steps * config.batch_size * config.window
        losses, speed = self.unlogged, num_tokens / self._seconds
        self.unlogged, self._num_steps, self._seconds = [], 0, 0.0
        if not losses:
            return
        elapsed, num_steps = time.perf_counter() - self._training_start, step - self._first_step
        line = {
            "step": step,
            "loss": fmean(losses),
            **self._other_losses,
            "learning_rate": float(self._schedule(step - len(self.skipped) - 1)),
            "gradient_norm": self._gradient_norm,
            "tokens_per_second": round(speed, 1),
            "seconds_left": round(elapsed * (config.num_steps - step) / num_steps, 1),
        }
        utilization = ""
        if self._peak:
            line["mfu"] = round(self._flops_per_token * speed / self._peak, 4)
            utilization = f"{line['mfu']:5.1%}  "
        self._log(line)
        left = datetime.timedelta(seconds=round(line["seconds_left"]))
        self._print(
            f"{step:7d}  {line['loss']:7.4f}  {line['learning_rate']:8.2e}  "
            f"{self._gradient_norm:8.3g}  {speed:10,.0f}  {utilization}{left}"
        )

    def _log(self, line: dict[str, Any]) -> None:
        self._run.log(line)
        if self._writer is not None:
            for name, value in line.items():
                if name != "step":
                    self._writer.add_scalar(name, value, line["step"])

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
        line_printed()


def check_tensorboard(config: TrainConfig) -> None:
    """Raises an error if tensorboardX is needed but not installed."""
    if config.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise CommandLineError(
            "--tensorboard: needs the package tensorboardX: pip install tensorboardX"
        )


def open_writer(run: Run) -> Any:
    """A writer of TensorBoard's events into the run's folder."""
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(run.folder))
