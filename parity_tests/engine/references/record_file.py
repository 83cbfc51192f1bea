"""Writes and reads arrays with JSON metadata in a safetensors file. Damaged files are refused."""

import hashlib
import json
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401, NumPy then knows their names
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_models.checks.values import described
from parity_tests.engine.problem import Arrays, is_flag
from twinscan.files import whole

KEY, CHECKSUM = "twinscan", "twinscan.checksum"
"""The keys of the file's metadata: the facts as JSON, and a checksum of facts and arrays."""
SCHEMA = 5
PLAIN = {np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "bool")}
"""The dtypes that safetensors stores directly; arrays of other dtypes are stored as bytes."""


def write(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Writes a file completely or not at all. `facts` must be values that JSON can hold.

    Equal arrays are stored once.
    """
    stored = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    others = {
        name: {"dtype": str(array.dtype), "shape": array.shape}
        for name, array in stored.items()
        if array.dtype not in PLAIN
    }
    for name in others:
        stored[name] = np.frombuffer(stored[name].tobytes(), np.uint8)
    first: dict[Any, str] = {}
    stored_as = {
        name: first.setdefault((a.dtype, a.shape, hashlib.sha256(a.data).digest()), name)
        for name, a in stored.items()
    }
    stored = {name: stored[name] for name in first.values()}
    head = json.dumps({"schema": SCHEMA, "stored_as": stored_as, "others": others, **facts})
    metadata = {KEY: head, CHECKSUM: _checksum(stored, head)}
    with whole(path) as partial:
        save_file(stored, partial, metadata=metadata)


def read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the facts of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, is not a record, or has another schema.

    """
    path.open("rb").close()
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path}: expected a complete file that parity_tests.record wrote: {error}"
        ) from None
    if KEY not in metadata:
        raise ValueError(f"{path}: expected a file that parity_tests.record wrote, got another one")
    if metadata.get(CHECKSUM) != _checksum(arrays, metadata[KEY]):
        raise ValueError(f"{path}: a damaged record, record it again")
    facts = json.loads(metadata[KEY])
    if facts["schema"] != SCHEMA:
        raise ValueError(
            f"{path}: a record of schema {facts['schema']}, this version reads {SCHEMA}: "
            "record it again"
        )
    arrays = {name: arrays[first] for name, first in facts["stored_as"].items()}
    for name, how in facts["others"].items():
        arrays[name] = arrays[name].view(np.dtype(how["dtype"])).reshape(how["shape"])
    return arrays, facts


def _checksum(arrays: Mapping[str, np.ndarray], head: str) -> str:
    checksum = zlib.crc32(head.encode())
    for name in sorted(arrays):
        checksum = zlib.crc32(arrays[name].data, zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def pack(tree: Any, arrays: list[np.ndarray]) -> Any:
    """A tree of arrays and flags as JSON. Its arrays are appended to the list."""
    if tree is None or is_flag(tree):
        return {"flag": tree}
    if isinstance(tree, np.ndarray):
        arrays.append(tree)
        return {"array": len(arrays) - 1}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [pack(value, arrays) for value in tree]}
    if type(tree) in (dict, OrderedDict) and all(isinstance(key, str | int) for key in tree):
        return {"dict": [[key, pack(value, arrays)] for key, value in tree.items()]}
    raise TypeError(
        f"inputs: a record holds arrays and flags in tuples, lists and dicts, got {described(tree)}"
    )


def unpack(node: Any, arrays: list[np.ndarray]) -> Any:
    """The tree that `pack` was given, with arrays from the list."""
    ((kind, value),) = node.items()
    if kind == "flag":
        return value
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {key: unpack(each, arrays) for key, each in value}
    return {"tuple": tuple, "list": list}[kind](unpack(each, arrays) for each in value)
