"""What `python -m train` adds to its training steps, and the same training in torch.

The time of a step is the difference between a longer and a shorter run, divided by the difference
of their numbers of steps. It therefore does not include compilation or the first and the last
evaluation.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from benchmarks.compare import Session
from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import NATIVE, OURS, CannotSolve, Framework, with_kernels, without_kernels
from benchmarks.report.table import show
from train.data.vocabulary import Characters
from train.data.windows import Batches, Windows, split
from train.run.config import PRESETS, TrainConfig
from train.run.folder import Run, build_trainer
from train.run.loop import STEPS_PER_CALL, train

PART = "training step"
PRESET_STEPS = {"lstm": (20, 80), "all-work": (500, 3000)}
"""The numbers of steps of the shorter and the longer run."""
CHECKPOINT_EVERY = 50
"""Number of steps between checkpoints. The preset lstm takes a few seconds for so many."""
ALONE, SAVING = f"{OURS}, its steps alone", f"{OURS}, a checkpoint every {CHECKPOINT_EVERY} steps"
TORCH = "torch"
VOCABULARY = Characters("".join(map(chr, range(32, 97))))
TOKENS = 200_000


def config_of(preset: str, num_steps: int, checkpoint_every: int | None = None) -> TrainConfig:
    """The config of a preset, with a constant learning rate and evaluations of a single batch."""
    config = PRESETS[preset]
    model = dataclasses.replace(config.model, vocab_size=len(VOCABULARY))
    optimizer = dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0)
    return dataclasses.replace(
        config,
        model=model,
        optimizer=optimizer,
        num_steps=num_steps,
        eval_every=checkpoint_every or num_steps,
        eval_batches=1,
    )


def windows_of(config: TrainConfig) -> dict[str, Windows]:
    """The windows of random characters."""
    tokens = np.random.default_rng(0).integers(len(VOCABULARY), size=TOKENS, dtype=np.int32)
    return split(tokens, config.window)


@cache
def trainer_of(preset: str):
    """The trainer of a preset, which is compiled once with the kernels and once without them."""
    return build_trainer(config_of(preset, 1), devices=jax.devices()[:1])


@without_kernels()
def steps_alone(preset: str, num_steps: int) -> float:
    """The seconds of the steps alone, on batches that are already on the device."""
    trainer, config = trainer_of(preset), config_of(preset, num_steps)
    batches = Batches(windows_of(config)["train"], batch_size=config.batch_size, seed=0)
    tokens = trainer.put(np.stack([batches[i] for i in range(STEPS_PER_CALL)]))
    state = trainer.initial_state()
    start = time.perf_counter()
    for _ in range(0, num_steps, STEPS_PER_CALL):
        state, _ = trainer.steps(state, tokens, STEPS_PER_CALL)
    jax.block_until_ready(state)
    return time.perf_counter() - start


def seconds_of_run(preset: str, num_steps: int, checkpoint_every: int | None = None) -> float:
    """The seconds of a whole run, in a temporary folder."""
    config = config_of(preset, num_steps, checkpoint_every)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder, "run"), config, VOCABULARY, "")
        start = time.perf_counter()
        train(run, trainer_of(preset), windows_of(config), Console(quiet=True))
        return time.perf_counter() - start


@without_kernels()
def whole_run(preset: str, num_steps: int) -> float:
    """The seconds of a run that evaluates and saves at its end only."""
    return seconds_of_run(preset, num_steps)


@with_kernels()
def run_with_kernels(preset: str, num_steps: int) -> float:
    """The same with the kernels of twinscan-native."""
    return seconds_of_run(preset, num_steps)


@without_kernels()
def run_with_checkpoints(preset: str, num_steps: int) -> float:
    """The seconds of a run that evaluates and saves every `CHECKPOINT_EVERY` steps."""
    return seconds_of_run(preset, num_steps, CHECKPOINT_EVERY)


def torch_run(preset: str, num_steps: int) -> float:
    """The seconds of the twin's steps on the same batches, with a loss read every `log_every`."""
    import torch

    import torch_ref

    config = config_of(preset, num_steps)
    twin = getattr(torch_ref, type(config.model).__name__.removesuffix("Config"))
    model = twin.from_config(config.model)
    of_config = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=of_config.learning_rate,
        betas=of_config.betas,
        weight_decay=of_config.weight_decay,
    )
    batches = Batches(windows_of(config)["train"], batch_size=config.batch_size, seed=config.seed)
    start = time.perf_counter()
    for step in range(num_steps):
        tokens = torch.from_numpy(batches[step].astype(np.int64))
        optimizer.zero_grad()
        logits, _ = model(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        if (step + 1) % config.log_every == 0:
            loss.item()
    return time.perf_counter() - start


SIDES: dict[str, tuple[Framework, Callable[[str, int], float]]] = {
    OURS: ("jax", whole_run),
    NATIVE: ("jax", run_with_kernels),
    ALONE: ("jax", steps_alone),
    SAVING: ("jax", run_with_checkpoints),
    TORCH: ("torch", torch_run),
}
ONLY_LSTM = (NATIVE, SAVING)
"""The sides that are measured for the preset lstm only."""


def measure(session: Session) -> Outcome:
    """Measures all presets."""
    outcome = Outcome()
    for preset in ("lstm",) if session.quick else PRESET_STEPS:
        found = session.measure_once(
            f"{__name__}: {preset}", partial(measure_preset, session, preset)
        )
        show(session.console, found)
        outcome += found
    return outcome


def measure_preset(session: Session, preset: str) -> Outcome:
    """Runs the sides in turn. Takes the median of each side's times, and of the ratios."""
    few, many = (20, 40) if session.quick else PRESET_STEPS[preset]
    sides = {
        name: side for name, side in SIDES.items() if preset == "lstm" or name not in ONLY_LSTM
    }
    outcome = Outcome()
    # Each side compiles in a run that is not timed.
    for name, (framework, side) in [*sides.items()]:
        session.workers.device(framework)
        try:
            session.workers.call(framework, side, preset, few)
        except CannotSolve as error:
            outcome.left_out[f"{name} ({preset})"] = str(error)
            del sides[name]
    turns: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if session.quick else 5):
        for name, (framework, side) in sides.items():
            short, long = (session.workers.call(framework, side, preset, n) for n in (few, many))
            turns[name].append((long - short) / (many - few))
    # Record the median of each side, and check the medians of the ratios within a turn.
    ms = {name: 1e3 * np.array(seconds) for name, seconds in turns.items()}
    outcome.rows = [
        Row(preset, PART, name, sides[name][0], float(np.median(times)), calls=len(times))
        for name, times in ms.items()
    ]

    def add(what: str, values: np.ndarray, bound: float) -> None:
        outcome.checks.append(Check(preset, PART, what, float(np.median(values)), bound))

    if preset == "lstm":
        add(f"{OURS} / its steps alone", ms[OURS] / ms[ALONE], 1.03)
        add("with checkpoints / without", ms[SAVING] / ms[OURS], 1.05)
    else:
        add("ms that the loop adds to a step", ms[OURS] - ms[ALONE], 0.3)
    add(f"{OURS} / {TORCH}", ms[OURS] / ms[TORCH], 1.15)
    if NATIVE in ms:
        add(f"{NATIVE} / {TORCH}", ms[NATIVE] / ms[TORCH], 0.95)
    return outcome
