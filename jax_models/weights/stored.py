"""Arrays that are read only when their values are needed."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array with a known shape and dtype, whose values are read by `np.asarray(stored)`.

    >>> stored = StoredArray((2,), np.dtype("float32"), lambda part: np.ones(2, np.float32)[part])
    >>> np.asarray(stored)
    array([1., 1.], dtype=float32)
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[slice | EllipsisType], np.ndarray]
    """Reads a part of the first axis, or with `...` everything."""
    reads_parts: bool = True
    """Whether a part can be read without the rest. If not, callers read everything and slice it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Reads the values, each time anew."""
        return np.array(self.read(...), dtype, copy=copy)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Reads a part of the first axis, each time anew."""
        return self.read(part)


def dtype_of(value: Any) -> np.dtype:
    """The dtype of an array or a torch tensor, found without reading its values.

    Raises:
        ValueError: the value is neither, or numpy has no such dtype.

    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ValueError(f"expected a tensor or an array, got {type(value).__name__}")
    name = str(value.dtype)
    try:
        return jnp.dtype(name.removeprefix("torch.") if hasattr(value, "detach") else value.dtype)
    except TypeError:
        raise ValueError(f"expected floating numbers, got {name}") from None


def is_floating(value: Any) -> bool:
    """Whether a value has floats of more than 8 bits. Those of 8 bits are quantized weights."""
    try:
        dtype = dtype_of(value)
    except ValueError:
        return False
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def cast(weights: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Casts floating weights to a dtype. Each array is rounded when it is read."""

    def rounded(value: Any) -> StoredArray:
        def read(part: slice | EllipsisType) -> np.ndarray:
            with np.errstate(over="ignore"):  # `from_torch` warns about NaN and infinite values
                return as_numpy(value if part is ... else value[part]).astype(dtype)

        return StoredArray(tuple(value.shape), jnp.dtype(dtype), read)

    return {
        key: rounded(value) if is_floating(value) and dtype_of(value) != dtype else value
        for key, value in weights.items()
    }


def as_numpy(value) -> np.ndarray:
    """Converts an array or a torch tensor of any dtype to a numpy array."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        uint16 = sys.modules["torch"].uint16
        return tensor.contiguous().view(uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
