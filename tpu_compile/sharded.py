"""Training steps that are too large for one chip, and checks of their collectives."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_models import HawkLanguageModelConfig
from jax_models.models.hf import published_models
from tpu_compile.hlo import Array, Collective
from tpu_compile.libtpu import Topology
from tpu_compile.programs import Program, lower_train_step
from train.process.digest import leaves_by_path
from train.run.config import TrainConfig
from train.run.folder import build_trainer
from train.trainer.mesh import BATCH_AXES, MODEL, SEQUENCE, MeshConfig, gathered_axis
from train.trainer.optimizer import OptimizerConfig
from train.trainer.step import Trainer

LARGE_MODEL = TrainConfig(
    model=HawkLanguageModelConfig(
        vocab_size=32_000,
        features=2048,
        num_layers=16,
        mlp_features=6144,
        parameterization="direct",
        remat="full",
        scan_layers=True,
    ),
    optimizer=OptimizerConfig(clip_norm=1.0),
    mesh=MeshConfig(data=32, model=8, fully_sharded=True),
    batch_size=128,
    window=1024,
    dtype="bfloat16",
)
"""1.07 billion parameters on 256 chips. No array of a batch has the sizes of a parameter."""
LONG_SEQUENCES = TrainConfig(
    model=HawkLanguageModelConfig(
        features=1024,
        num_layers=12,
        mlp_features=3072,
        parameterization="direct",
        remat="full",
        scan_layers=True,
    ),
    optimizer=OptimizerConfig(clip_norm=1.0),
    mesh=MeshConfig(data=1, sequence=16),
    batch_size=1,
    window=2**20,
    dtype="bfloat16",
)
"""One row of a million tokens on 16 chips."""
ON_16_CHIPS: dict[str, Any] = {
    "optimizer": OptimizerConfig(clip_norm=1.0),
    "mesh": MeshConfig(data=4, model=4, fully_sharded=True),
    "batch_size": 16,
    "window": 2048,
    "dtype": "bfloat16",
}
PADDING = 0.01
"""The share by which the compiler may pad the arrays that the chips exchange."""


def sharded_programs(
    topology: Callable[[str], Topology], *, large: bool = False
) -> Iterator[Program]:
    """The training steps of Hawk and, if `large`, of published hybrids.

    Hawk has 2 blocks unless `large`. Every further block exchanges the same again, and takes longer
    to compile.
    """
    of_hawk = [
        ("Hawk of 1.07 billion parameters", "v5e:16x16", LARGE_MODEL, parameter_faults),
        ("Hawk on a million tokens", "v5e:4x4", LONG_SEQUENCES, time_faults),
    ]
    of_published = [
        (name, "v5e:4x4", TrainConfig(model, **ON_16_CHIPS), parameter_faults)
        for name, model in published_models(remat="full").items()
    ]
    for name, chips, config, faults in of_hawk + of_published if large else of_hawk:
        if not large:
            name = f"2 blocks of {name}"
            config = dataclasses.replace(
                config, model=dataclasses.replace(config.model, num_layers=2)
            )
        mesh, devices = config.mesh, topology(chips).chips
        yield Program(
            name,
            f"mesh {mesh.data} × {mesh.model} × {mesh.sequence}",
            chips,
            partial(lower_train_step, config, devices),
            exchange_faults=partial(faults, config, devices),
        )


def parameter_faults(
    config: TrainConfig, chips: Sequence[Any], found: Sequence[Collective]
) -> Iterator[str]:
    """Checks a step whose parameters are fully sharded and divided over `model`.

    Along the batch axes, each parameter should be gathered once and each gradient reduced once, and
    a chip should handle only its part along `model`. Along `model`, no parameter or gradient may be
    gathered. XLA may divide parameters that the layers leave whole.
    """
    # No array that is exchanged over `model` may have the size of a parameter.
    trainer = build_trainer(config, devices=chips)
    whole = _paths_by_size(trainer)
    for each in found:
        for array in each.results if MODEL in _axes(each, trainer) else ():
            if path := whole.get(_sizes(array.shape)):
                yield f"{each.kind} of {_described(array)} over model, the size of {path}"
    yield from _gradient_faults(trainer, found)
    parts = _sizes_on_chip(trainer, lambda spec: gathered_axis(spec) is not None)
    gathered = _count_numbers(_along_batch_axes(trainer, found, "all-gather"))
    if not _is_within(gathered, *parts):
        yield (
            f"{gathered:,} numbers are gathered, a chip's part of the parameters has {parts[1]:,}"
        )


def time_faults(
    config: TrainConfig, chips: Sequence[Any], found: Sequence[Collective]
) -> Iterator[str]:
    """Checks a step whose time axis is divided over chips that each have all parameters.

    The chips should exchange only the states at the boundaries of their parts, and reduce each
    gradient once.
    """
    trainer = build_trainer(config, devices=chips)
    yield from _gradient_faults(trainer, found)
    model = trainer.model(trainer.abstract_params)
    states = jax.eval_shape(lambda: model.init_state(config.batch_size))
    largest = max(state.size for state in jax.tree.leaves(states))
    carries = largest * trainer.mesh.shape[SEQUENCE]
    of_params = {_sizes(param.shape) for param in jax.tree.leaves(trainer.abstract_params)}
    for each in found:
        for array in each.results:
            is_gradient = each.kind in REDUCING and _sizes(array.shape) in of_params
            if math.prod(array.shape) > carries and not is_gradient:
                yield f"{each.kind} of {_described(array)}, the chips' carries have {carries:,}"


REDUCING = ("all-reduce", "reduce-scatter")


def _gradient_faults(trainer: Trainer, found: Sequence[Collective]) -> Iterator[str]:
    reduced = _count_numbers(_along_batch_axes(trainer, found, *REDUCING))
    gradients = _sizes_on_chip(trainer, lambda _: True)
    if not _is_within(reduced, *gradients):
        yield (
            f"{reduced:,} numbers are reduced, a chip's part of the gradients has {gradients[1]:,}"
        )


def _paths_by_size(trainer: Trainer) -> dict[tuple[int, ...], str]:
    """The paths of the matrices that `model` divides, by the sizes of the undivided matrices.

    A size is also listed for the part on a chip along the batch axes, and for the matrices of all
    equal layers stacked in one array.
    """
    found, parts = {}, math.prod(trainer.mesh.shape[axis] for axis in BATCH_AXES)
    params = leaves_by_path(trainer.abstract_params)
    alike = Counter(re.sub(r"\d+", "", path) for path in params)
    for path, param in params.items():
        spec, shape = trainer.specs[path], [*param.shape]
        if MODEL not in spec or len(shape) == 1:
            continue
        part = shape.copy()
        if (axis := gathered_axis(spec)) is not None:
            part[axis] //= parts
        layers = alike[re.sub(r"\d+", "", path)]
        found |= {_sizes((n, *x)): path for x in (shape, part) for n in (1, layers)}
    return found


def _axes(collective: Collective, trainer: Trainer) -> set[str]:
    """The mesh axes along which a collective exchanges."""
    mesh = trainer.mesh
    groups = collective.groups or (range(mesh.size),)
    places = [np.unravel_index(np.array(group), [*mesh.shape.values()]) for group in groups]
    return {
        name
        for i, name in enumerate(mesh.axis_names)
        if any(np.ptp(place[i]) > 0 for place in places)
    }


def _along_batch_axes(
    trainer: Trainer, found: Sequence[Collective], *kinds: str
) -> Iterator[Collective]:
    """The collectives of these kinds that exchange only along the batch axes."""
    for each in found:
        axes = _axes(each, trainer)
        if each.kind in kinds and axes and axes <= {*BATCH_AXES}:
            yield each


def _count_numbers(collectives: Iterable[Collective]) -> int:
    return sum(math.prod(array.shape) for each in collectives for array in each.results)


def _sizes_on_chip(trainer: Trainer, counts: Callable[[P], bool]) -> tuple[int, int]:
    """The number of elements on one chip along `model`, of the parameters whose spec `counts`.

    The first number is without the parameters that the layers leave whole, which XLA may divide and
    exchange in another way. The second number is with them.
    """
    model = trainer.mesh.shape[MODEL]
    divided, whole = 0, 0
    for path, param in leaves_by_path(trainer.abstract_params).items():
        spec = trainer.specs[path]
        if counts(spec) and (MODEL in spec or model == 1):
            divided += param.size // model
        elif counts(spec):
            whole += param.size
    return divided, divided + whole


def _is_within(number: int, least: int, most: int) -> bool:
    return (1 - PADDING) * least <= number <= (1 + PADDING) * most


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a shape, sorted and without ones, so that the order of axes does not matter."""
    return tuple(sorted(size for size in shape if size > 1))


def _described(array: Array) -> str:
    return f"{array.dtype}{[*array.shape]}"
