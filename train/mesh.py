"""Which device has what: the mesh, and the places of parameters on it."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.typing import MISSING
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_models.options import CheckedFields

DATA, SEQUENCE, MODEL = "data", "sequence", "model"
BATCH_AXES = (DATA, SEQUENCE)
"""The mesh axes over which a batch is divided: its rows, and their time."""
HOST_DEVICES = "xla_force_host_platform_device_count"

COLUMNS, ROWS, UNITS = P(None, MODEL), P(MODEL, None), P(MODEL)
WIDE = (
    # Hawk: the recurrence's features
    (r"hawk\.(gate|recurrent)_proj\.kernel", COLUMNS),
    (r"hawk\.conv\.kernel", COLUMNS),
    (r"hawk\.conv\.bias", UNITS),
    (r"rglru\.(input|recurrence)_gate\.kernel", COLUMNS),
    (r"rglru\.a", UNITS),
    (r"hawk\.out_proj\.kernel", ROWS),
    # the MLPs of Hawk and of attention: the hidden units
    (r"(gate|up)_proj\.kernel", COLUMNS),
    (r"up_proj\.bias", UNITS),
    (r"down_proj\.kernel", ROWS),
    # RWKV's time mix: the features, or the heads
    (r"att\.(receptance|key|value|gate)\.kernel", COLUMNS),
    (r"att\.(time_decay|time_first|w0|a0|v0|k_k|k_a)", UNITS),
    (r"att\.(time_decay_w2|w2|a2|v2|g2)", COLUMNS),
    (r"att\.(time_faaaa|r_k)", ROWS),
    (r"att\.ln_x\.(scale|bias)", UNITS),
    (r"att\.output\.kernel", ROWS),
    # RWKV's channel mix: the hidden units
    (r"ffn\.key\.kernel", COLUMNS),
    (r"ffn\.value\.kernel", ROWS),
)
"""The parameters that the axis `model` divides, by the end of their paths; others are whole."""


@dataclasses.dataclass(frozen=True)
class MeshConfig(CheckedFields):
    """The devices, as a box: their number is data × model × sequence."""

    data: int | None = None
    """Devices that divide a batch's rows. None: all that are there and divide them evenly."""
    model: int = 1
    """Devices that divide the wide projections (tensor parallelism)."""
    sequence: int = 1
    """Devices that divide a row's time, in models whose recurrences are linear."""
    fully_sharded: bool = False
    """Keep a part of each parameter, and of the optimiser's state for it, on each device of data
    and sequence; a layer gathers a parameter when it reads it."""


def provide_devices(config: MeshConfig) -> None:
    """Where JAX finds nothing but a CPU, let it be as many devices as the mesh asks for.

    Not if the environment says how many it is, nor once JAX has started its devices.
    """
    count = (config.data or 1) * config.model * config.sequence
    flags = os.environ.get("XLA_FLAGS", "")
    is_told = "JAX_NUM_CPU_DEVICES" in os.environ or HOST_DEVICES in flags
    if count > 1 and not is_told:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def build_mesh(config: MeshConfig, *, rows: int, window: int, devices: Sequence[Any]) -> Mesh:
    """The mesh of a run.

    Args:
        config: the numbers of devices.
        rows: of a batch, or of a part of it where gradients are accumulated.
        window: steps of a row.
        devices: those that are there.

    Raises:
        ValueError: the devices, the rows or the window do not divide.

    """
    others = config.model * config.sequence
    if len(devices) % others:
        raise ValueError(
            f"mesh: expected model × sequence to divide the {len(devices)} devices, "
            f"got {config.model} × {config.sequence}"
        )
    data = config.data
    if data is None:
        available = len(devices) // others
        data = max(count for count in range(1, available + 1) if rows % count == 0)
    size = data * others
    if len(devices) % size:
        raise ValueError(
            f"mesh: expected data × model × sequence to divide the {len(devices)} devices, "
            f"got {data} × {config.model} × {config.sequence}"
        )
    if rows % data:
        raise ValueError(f"mesh.data: expected a divisor of the {rows} rows of a batch, got {data}")
    if window % config.sequence:
        raise ValueError(
            f"mesh.sequence: expected a divisor of the window of {window} steps, "
            f"got {config.sequence}"
        )
    return jax.make_mesh(
        (data, config.sequence, config.model),
        (DATA, SEQUENCE, MODEL),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[:size],
    )


def place(
    path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, fully_sharded: bool
) -> P:
    """Where a parameter is: which of its axes the mesh divides.

    Raises:
        ValueError: the axis `model` does not divide it.

    """
    model = mesh.shape[MODEL]
    of_path = (spec for pattern, spec in WIDE if re.search(rf"\.{pattern}$", path))
    spec = [*next(of_path, P())] if model > 1 else []
    spec += [None] * (len(shape) - len(spec))
    for size, axis in zip(shape, spec, strict=True):
        if axis == MODEL and size % model:
            raise ValueError(f"mesh.model: expected a divisor of the {size} of {path}, got {model}")
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if fully_sharded and parts > 1:
        free = [i for i, axis in enumerate(spec) if axis is None and shape[i] % parts == 0]
        if free:
            spec[max(free, key=lambda i: shape[i])] = BATCH_AXES
    return P(*spec)


def gathered_axis(spec: P) -> int | None:
    """Which axis of a parameter lies in parts on the devices that share its batch."""
    return next((i for i, axis in enumerate(spec) if axis == BATCH_AXES), None)


def without_model(spec: P) -> P:
    """The places that a `shard_map` over the batch's axes sees."""
    return P(*(None if axis == MODEL else axis for axis in spec))


class GatheredParam(nnx.Param):
    """A parameter of which a device has a part; who reads it, inside a `shard_map`, gets all of it.

    The derivative of the gathering is the sum of all devices' gradients, each device its part.
    """

    def get_value(self, *, index: Any = MISSING) -> Any:
        """All of it, or what of it has the index."""
        axis = self.get_metadata("axis")
        whole = lax.all_gather(super().get_value(), BATCH_AXES, axis=axis, tiled=True)
        whole = with_layout_constraint(whole, Layout(tuple(range(whole.ndim))))
        return whole if index is MISSING or index is ... else whole[index]


def gathering(model: nnx.Module, axes: dict[str, int]) -> None:
    """Make a model gather the parameters of these paths, along these axes."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            axis = axes.get(".".join(map(str, (*path, name))))
            if isinstance(value, nnx.Param) and axis is not None:
                setattr(module, name, GatheredParam(value.get_raw_value(), axis=axis))
