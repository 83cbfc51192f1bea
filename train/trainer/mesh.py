"""The mesh of devices, and the sharding of parameters over it."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.typing import MISSING
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_models.mesh_axes import VOCABULARY, declared_mesh_axes
from jax_models.options import CheckedFields
from train.process.digest import leaves_by_path

DATA, SEQUENCE, MODEL = "data", "sequence", "model"
BATCH_AXES = (DATA, SEQUENCE)
"""The mesh axes that divide a batch: its rows, and the time steps of each row."""
HOST_DEVICES = "xla_force_host_platform_device_count"
THREADS_OF_DEVICE = 4
"""Number of threads for each virtual device of a CPU.

All virtual devices share a pool of `NPROC` threads, in which collectives wait for each other. With
one thread per device they wait forever; with two they did not."""


@dataclasses.dataclass(frozen=True)
class MeshConfig(CheckedFields):
    """The mesh of devices. It has data × model × sequence of them."""

    data: int | None = None
    """Number of devices over which the rows of a batch are divided. None: as many of the available
    devices as divide the rows evenly."""
    model: int = 1
    """Number of devices over which the wide projections are divided (tensor parallelism), the
    experts, and the vocabulary if it divides evenly."""
    sequence: int = 1
    """Number of devices over which the time of each row is divided, in models without RNN, LSTM,
    GRU and `SelfAttentionBlock`."""
    fully_sharded: bool = False
    """Shard each parameter, and its optimizer state, over the devices of data and sequence. A layer
    gathers a parameter when it reads it; if model is above 1, the step gathers all of them when it
    begins."""


def provide_devices(config: MeshConfig) -> None:
    """Makes a CPU act as the number of devices that the mesh needs.

    This has no effect on other platforms, if the environment sets the number, or once JAX has
    started its devices.
    """
    count = (config.data or 1) * config.model * config.sequence
    if count == 1:
        return
    threads = max(os.cpu_count() or 1, THREADS_OF_DEVICE * count)
    os.environ.setdefault("NPROC", str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    if "JAX_NUM_CPU_DEVICES" not in os.environ and HOST_DEVICES not in flags:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Ignores a mesh that the caller has set, because a command builds its own."""
    with jax.set_mesh(Mesh(np.empty((), object), ())):
        yield


def build_mesh(config: MeshConfig, *, rows: int, window: int, devices: Sequence[Any]) -> Mesh:
    """The mesh of a run.

    Args:
        config: the numbers of devices.
        rows: number of rows in a batch, or in a part of it if gradients are accumulated.
        window: number of steps in a row.
        devices: the available devices.

    Raises:
        ValueError: the devices, the rows or the window cannot be divided evenly.

    """
    # Without a number for `data`, use as many of the remaining devices as divide the rows.
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
    # Check all three axes before JAX builds the mesh, to name the option that is wrong.
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


def param_specs(
    model: nnx.Module, mesh: Mesh | AbstractMesh, *, fully_sharded: bool
) -> dict[str, P]:
    """The sharding of each parameter of a model, by its path.

    The mesh axis `model` divides the axes that the layers of the model declare as `mesh_axes`.

    Raises:
        ValueError: the layers declare no axis that `model` could divide, or `model` does not divide
            a declared axis evenly.

    """
    declared = declared_mesh_axes(model)
    names = {axis[0] for axis in declared.values() if axis is not None}
    if mesh.shape[MODEL] > 1 and not names - {VOCABULARY}:
        raise ValueError(
            f"mesh.model: expected 1, since no layer of {type(model).__name__} declares mesh_axes "
            "that devices could divide (mesh.data and mesh.fully_sharded divide any model), got "
            f"{mesh.shape[MODEL]}"
        )
    specs = {}
    for path, param in leaves_by_path(nnx.state(model, nnx.Param)).items():
        name = path.removesuffix(".value")
        specs[path] = param_spec(name, param.shape, declared.get(name), mesh, fully_sharded)
    return specs


def param_spec(
    path: str,
    shape: tuple[int, ...],
    declared: tuple[str, int] | None,
    mesh: Mesh | AbstractMesh,
    fully_sharded: bool,
) -> P:
    """The sharding of a parameter: which of its axes the mesh divides.

    Raises:
        ValueError: the mesh axis `model` does not divide the declared axis evenly.

    """
    model = mesh.shape[MODEL]
    spec: list[Any] = [None] * len(shape)
    if declared is not None and model > 1:
        name, axis = declared
        if shape[axis] % model == 0:
            spec[axis] = MODEL
        elif name != VOCABULARY:
            raise ValueError(
                f"mesh.model: expected a divisor of {shape[axis]}, the size of axis {name!r} of "
                f"{path}, got {model}"
            )
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if fully_sharded and parts > 1:
        free = [i for i, axis in enumerate(spec) if axis is None and shape[i] % parts == 0]
        if free:
            spec[max(free, key=lambda i: shape[i])] = BATCH_AXES
    return P(*spec)


def keep_axes(spec: P, *axes: Any) -> P:
    """The spec with only these axes of the mesh."""
    return P(*(axis if axis in axes else None for axis in spec))


def layer_spec(spec: P, mesh: Mesh) -> P:
    """The sharding of a parameter when a layer reads it, inside a `shard_map` over the batch axes.

    If `model` divides parameters, the batch axes are gathered before the `shard_map`, because XLA
    would gather the axis `model`, too, if a layer gathered such a parameter itself.
    """
    return spec if mesh.shape[MODEL] == 1 else keep_axes(spec, MODEL)


class ShardedParam(nnx.Param):
    """A sharded parameter inside a `shard_map` over the batch axes.

    If the batch axes divide the parameter, a device holds a part and gathers the whole when a layer
    reads it. The derivative sums the gradients of all devices and leaves each device its part. If
    `model` divides the parameter, it stays divided, and so does its gradient.
    """

    def get_value(self, *, index: Any = MISSING) -> Any:
        """The value that a layer reads, or its element at the index."""
        spec, value = self.get_metadata("spec"), super().get_value()
        if (axis := gathered_axis(spec)) is not None:
            value = lax.all_gather(value, BATCH_AXES, axis=axis, tiled=True)
            value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        elif MODEL in spec:
            value = lax.with_sharding_constraint(value, spec)
        return value if index is MISSING or index is ... else value[index]


def gathered_axis(spec: P) -> int | None:
    """The axis of a parameter that the batch axes of the mesh divide, or None."""
    return next((i for i, axis in enumerate(spec) if axis == BATCH_AXES), None)


def shard_params(model: nnx.Module, specs: Mapping[str, P]) -> None:
    """Replaces the parameters at these paths by `ShardedParam`s with these shardings."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            spec = specs.get(".".join(map(str, (*path, name))), P())
            if isinstance(value, nnx.Param) and any(spec):
                setattr(module, name, ShardedParam(value.get_raw_value(), spec=spec))
