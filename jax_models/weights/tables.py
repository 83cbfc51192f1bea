"""Weight tables for the layers that exist in both frameworks.

A table is a list of `Weight` rows. A layout is the name of a table. If a layer can read several
kinds of `state_dict`, it has a table for each, and its `torch_layouts` returns them by name.
`from_torch` and `to_torch` use the same table in opposite directions.
"""

from math import prod
from typing import Any

import numpy as np

from jax_models.checks.arguments import checked
from jax_models.checks.values import check_divides, described
from jax_models.weights.arguments import ROW_ARGUMENTS, Shape
from jax_models.weights.rows import (
    Weight,
    first_last,
    flipped,
    join,
    last_first,
    namespace,
    parts,
    reshaped,
    same,
    transposed,
    unused,
)

Table = list[Weight]
Layouts = dict[str, Table]
"""Tables by the names of their layouts."""


def checked_table(argument: str, table: Any, expected: str = "a list of `Weight` rows") -> Table:
    """Returns a table, or raises an error that says how to make one of the value."""
    rows = table if isinstance(table, list) else []
    others = [row for row in rows if not isinstance(row, Weight)]
    if isinstance(table, list) and not others:
        return table
    got = f"{described(others[0])} in it" if others else described(table)
    if isinstance(table, Weight):
        got = "a single row: put it into a list"
    elif others and isinstance(others[0], list):
        got += ": unpack it, [*rows, …]"
    elif isinstance(table, dict) and table:
        got += f": choose the table of one layout, such as [{next(iter(table))!r}]"
    elif hasattr(table, "torch_layouts"):
        got += ": its torch_layouts() returns its tables by the names of their layouts"
    raise TypeError(f"{argument}: expected {expected}, got {got}")


checked_rows = checked({**ROW_ARGUMENTS, Table: checked_table})
"""The decorator of the functions that make a table. It checks their arguments."""


@checked_rows
def linear(
    param: str, key: str, *, bias: bool | None = None, use_bias: bool | None = None
) -> Table:
    """`nnx.Linear` and `torch.nn.Linear`."""
    return _with_bias(
        transposed(join(param, "kernel"), join(key, "weight")), param, key, bias, use_bias
    )


@checked_rows
def linear_general(
    param: str,
    key: str,
    *,
    in_shape: Shape,
    out_shape: Shape,
    bias: bool | None = None,
    use_bias: bool | None = None,
) -> Table:
    """`nnx.LinearGeneral` with several axes, and `torch.nn.Linear` with the axes flattened.

    A projection to heads, for example, has `in_shape=(features,)` and
    `out_shape=(num_heads, head_size)`.
    """
    flat = (prod(in_shape), prod(out_shape))
    weight = reshaped(
        transposed(join(param, "kernel"), join(key, "weight")), (*in_shape, *out_shape), flat
    )
    of_bias = reshaped(same(join(param, "bias"), join(key, "bias")), out_shape, flat[1:])
    return [weight, of_bias] if _has_bias(bias, use_bias) else [weight]


@checked_rows
def linear_of_image(
    param: str,
    key: str,
    *,
    shape: Shape,
    bias: bool | None = None,
    use_bias: bool | None = None,
) -> Table:
    """`linear` on a flattened image: (height, width, channels) here, channels first in torch.

    `shape` is torch's, (channels, height, width), or channels and any other number of axes.
    """
    if not shape:
        raise ValueError("shape: expected at least one axis, got ()")

    def to_jax(a):
        return (last_first(a.reshape(-1, *shape)).reshape(-1, a.shape[0]),)

    def to_torch(a):
        return (first_last(a.reshape(*shape[1:], shape[0], -1)).reshape(a.shape[1], -1),)

    weight = Weight((join(param, "kernel"),), (join(key, "weight"),), to_jax, to_torch)
    return _with_bias(weight, param, key, bias, use_bias)


@checked_rows
def conv(param: str, key: str, *, bias: bool | None = None, use_bias: bool | None = None) -> Table:
    """`nnx.Conv` and `torch.nn.Conv1d`, `Conv2d` or `Conv3d`, with any number of groups."""
    return _with_bias(
        flipped(join(param, "kernel"), join(key, "weight")), param, key, bias, use_bias
    )


@checked_rows
def conv_transpose(
    param: str,
    key: str,
    *,
    transpose_kernel: bool = False,
    groups: int = 1,
    bias: bool | None = None,
    use_bias: bool | None = None,
) -> Table:
    """`nnx.ConvTranspose` and `torch.nn.ConvTranspose1d`, `2d` or `3d`.

    torch's kernel is (in, out / groups, …). Flax's is (…, in, out) and reversed along its spatial
    axes, or with `transpose_kernel=True`, (…, out, in) and not reversed. Flax has no groups. With
    groups, a kernel of `jax.lax.conv_general_dilated` is (…, in / groups, out).
    """
    if transpose_kernel:
        return conv(param, key, bias=bias, use_bias=use_bias)

    def to_jax(a):
        spatial = tuple(range(2, a.ndim))
        grouped = a.reshape(groups, -1, *a.shape[1:]).swapaxes(0, 1)
        kernel = grouped.reshape(a.shape[0] // groups, -1, *a.shape[2:])
        return (namespace(a).flip(kernel.transpose(*spatial, 0, 1), tuple(range(a.ndim - 2))),)

    def to_torch(a):
        kernel = namespace(a).moveaxis(
            namespace(a).flip(a, tuple(range(a.ndim - 2))), (-2, -1), (0, 1)
        )
        grouped = kernel.reshape(a.shape[-2], groups, -1, *a.shape[:-2]).swapaxes(0, 1)
        return (grouped.reshape(a.shape[-2] * groups, -1, *a.shape[:-2]),)

    weight = Weight((join(param, "kernel"),), (join(key, "weight"),), to_jax, to_torch)
    return _with_bias(weight, param, key, bias, use_bias)


@checked_rows
def dense(param: str, key: str, *, bias: bool | None = None, use_bias: bool | None = None) -> Table:
    """`nnx.Linear` and Linen's `Dense`."""
    return _with_bias(same(join(param, "kernel"), join(key, "kernel")), param, key, bias, use_bias)


@checked_rows
def layer_norm(
    param: str, key: str, *, bias: bool | None = None, use_bias: bool | None = None
) -> Table:
    """`nnx.LayerNorm` and `torch.nn.LayerNorm`."""
    return _with_bias(same(join(param, "scale"), join(key, "weight")), param, key, bias, use_bias)


@checked_rows
def rms_norm(param: str, key: str, name: str = "weight") -> Table:
    """`nnx.RMSNorm` and `torch.nn.RMSNorm`, or another norm, whose scale is called `name`."""
    return [same(join(param, "scale"), join(key, name))]


@checked_rows
def group_norm(param: str, key: str) -> Table:
    """`nnx.GroupNorm` and `torch.nn.GroupNorm`."""
    return layer_norm(param, key)


@checked_rows
def batch_norm(param: str, key: str, *, affine: bool = True, stats: str | None = None) -> Table:
    """`nnx.BatchNorm` and `torch.nn.BatchNorm1d`, `2d` or `3d`.

    `stats` is the path of the running mean and variance if they are in another collection, as in
    Linen. Flax does not count batches, so export writes 0 to torch's counter, which torch uses only
    with `momentum=None`.
    """
    stats = param if stats is None else stats
    return [
        *(layer_norm(param, key) if affine else []),
        same(join(stats, "mean"), join(key, "running_mean")),
        same(join(stats, "var"), join(key, "running_var")),
        unused(join(key, "num_batches_tracked"), np.zeros((), np.int64)),
    ]


@checked_rows
def multi_head_attention(
    param: str,
    key: str,
    *,
    num_heads: int,
    features: int,
    kv_features: int | None = None,
    bias: bool | None = None,
    use_bias: bool | None = None,
) -> Table:
    """`nnx.MultiHeadAttention`, or Linen's, and `torch.nn.MultiheadAttention`.

    `features` is torch's `embed_dim`. `kv_features` is torch's `kdim` and `vdim`, if given. In this
    case, torch has three matrices instead of one.
    """
    check_divides("num_heads", num_heads, "features", features)
    heads, names = (num_heads, features // num_heads), ("query", "key", "value")
    sizes = (features, kv_features or features, kv_features or features)
    kernels, biases = (
        [join(param, f"{name}.{what}") for name in names] for what in ("kernel", "bias")
    )
    # torch stores the three projections as one matrix, unless keys or values have another size.
    if kv_features is None:
        weights = [_of_heads(parts(kernels, join(key, "in_proj_weight")), (features,), heads)]
    else:
        weights = [
            reshaped(
                transposed(path, join(key, f"{name}_proj_weight")), (size, *heads), (size, features)
            )
            for path, name, size in zip(kernels, "qkv", sizes, strict=True)
        ]
    out = linear_general(
        join(param, "out"),
        join(key, "out_proj"),
        in_shape=heads,
        out_shape=(features,),
        bias=bias,
        use_bias=use_bias,
    )
    if _has_bias(bias, use_bias):
        weights.append(_of_heads(parts(biases, join(key, "in_proj_bias")), (), heads))
    return [*weights, *out]


def _of_heads(row: Weight, size: tuple[int, ...], heads: tuple[int, ...]) -> Weight:
    """The row with the last axis of each parameter divided into heads."""
    return row._replace(
        to_jax=lambda a: tuple(part.reshape(*size, *heads) for part in row.to_jax(a)),
        to_torch=lambda *values: row.to_torch(*(v.reshape(*size, prod(heads)) for v in values)),
    )


@checked_rows
def embedding(param: str, key: str) -> Table:
    """`nnx.Embed` and `torch.nn.Embedding`."""
    return [same(join(param, "embedding"), join(key, "weight"))]


@checked_rows
def nested(table: Table, param: str, key: str) -> Table:
    """The table of a layer that is the attribute `param` here and the submodule `key` in torch."""
    return [row.within(param, key) for row in table]


def _with_bias(
    weight: Weight, param: str, key: str, bias: bool | None, use_bias: bool | None
) -> Table:
    row = same(join(param, "bias"), join(key, "bias"))
    return [weight, row] if _has_bias(bias, use_bias) else [weight]


def _has_bias(bias: bool | None, use_bias: bool | None) -> bool:
    given = {value for value in (bias, use_bias) if value is not None}
    if len(given) == 2:
        raise ValueError(
            f"bias, use_bias: expected one of them, which mean the same, "
            f"got bias={bias} and use_bias={use_bias}"
        )
    return all(given)
