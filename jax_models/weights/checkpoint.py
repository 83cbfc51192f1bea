"""Opens the weights in a file or a folder. Each array is read only when its values are needed.

Supported are files of safetensors and torch.save, either single or in shards that an index file
lists, and orbax folders. When a file is opened, everything except its values is checked.
"""

import errno
import json
import mmap
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_models.weights.files import read_pth
from jax_models.weights.stored import StoredArray, dtype_of

SAFETENSORS, TORCH = (".safetensors",), (".pth", ".pt", ".bin", ".ckpt")
INDEX = "*.index.json"
NAMES_OF_TRANSFORMERS = tuple(
    f"{name}{suffix}"
    for name in ("model.safetensors", "pytorch_model.bin")
    for suffix in ("", ".index.json")
)
"""The names of transformers for files of weights, in its order. The first that exists is read."""
CONFIG = "config.json"
OF_RUN = ("vocabulary.json", "checkpoints")
"""What the folder of a run of `twinscan train` holds."""
ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
MODEL_ENTRIES = ("state_dict", "model_state_dict", "model")
"""The names that training programs give to the entry with the model's weights."""
DTYPE_NAMES = {"F": "float", "I": "int", "U": "uint", "BF": "bfloat", "BOOL": "bool"}
"""The names of dtypes in safetensors, without their number of bits."""


class CheckpointContents(NamedTuple):
    """The contents of a file or a folder."""

    weights: dict[str, StoredArray]
    config: dict[str, Any] | None
    """The fields of the config.json, if there is one."""


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointContents:
    """Opens the checkpoint in a file or a folder.

    Raises:
        ImportError: a package that the file needs is not installed.
        TypeError: `path` is not a path.
        OSError: a file is missing or cannot be opened.
        ValueError: a file is damaged or is not a checkpoint, or the folder contains no checkpoint
            or several, or is that of a run.

    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of a file or a folder, got {type(path).__name__}")
    path = Path(path)
    is_file_name = path.suffix in SAFETENSORS + TORCH
    if len(path.parts) == 2 and not is_file_name and not path.parent.exists():
        hint = "if this names a repository of Hugging Face, give the folder of your download"
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}; {hint}", str(path))
    path.stat()
    if path.is_file():
        return CheckpointContents(weights_in(path), None)
    # A run's newest weights are in its checkpoints, and its config has fields that no shape tells.
    if all((path / name).exists() for name in OF_RUN):
        raise ValueError(
            f"{path}: expected a checkpoint, got the folder of a run: use --run on the "
            "command line, or twinscan.Run.open(Path(…)).model() in Python"
        )
    config = json_object(path / CONFIG) if (path / CONFIG).exists() else None
    if any((path / name).exists() for name in ORBAX_FILES):
        return CheckpointContents(_orbax_weights(path), config)
    weights: dict[str, StoredArray] = {}
    for file, keys in _weight_files(path).items():
        found = weights_in(file)
        if missing := [key for key in keys or () if key not in found]:
            raise ValueError(f"{file.name}: no {missing[0]}, which the index says it has")
        weights |= found
    return CheckpointContents(weights, config)


def weights_in(path: Path) -> dict[str, StoredArray]:
    """Opens the arrays in one file.

    Raises:
        ImportError: a package that the file needs is not installed.
        OSError: the file cannot be opened.
        ValueError: the file is damaged, or has another format.

    """
    return _safetensors_weights(path) if path.suffix in SAFETENSORS else _torch_weights(path)


def _number(entry: dict[str, Any]) -> Any:
    """Decodes the `{"__float__": "Infinity"}` that transformers writes for infinity and NaN."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def json_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file does not contain a JSON object.

    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path.name}: expected a JSON object")
    return fields


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files with the weights of a folder, each with its keys according to the index file."""
    # The folder may have the same weights in two formats, or the state of a training beside them.
    files = [folder / name for name in NAMES_OF_TRANSFORMERS if (folder / name).exists()][:1]
    files = files or sorted(folder.glob(INDEX))
    for suffixes in SAFETENSORS, TORCH:
        files = files or [f for f in sorted(folder.iterdir()) if f.suffix in suffixes]
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        kinds = ", ".join(SAFETENSORS + TORCH)
        raise ValueError(
            f"{folder.name}: expected one file of weights ({kinds}), or an index of its parts, "
            f"got {found}"
        )
    if not files[0].match(INDEX):
        return {files[0]: None}
    places = json_object(files[0]).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise ValueError(f"{files[0].name}: expected a weight_map of keys to files")
    parts: dict[Path, list[str] | None] = {}
    for key, name in places.items():
        if Path(name).name != name:
            raise ValueError(f"{files[0].name}: expected files of its folder, got {name}")
        parts.setdefault(folder / name, []).append(key)  # pyright: ignore[reportOptionalMemberAccess]
    for part in parts:
        if not part.exists():
            raise FileNotFoundError(f"{files[0].name}: it lists {part.name}, which is missing")
    return parts


def _safetensors_weights(path: Path) -> dict[str, StoredArray]:
    """Opens a safetensors file, whose header the library checks.

    The arrays are then read by their offsets in the header rather than by the library, because the
    library maps the file, and mapped pages count as memory of this process.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(f"{path.name} needs safetensors: pip install safetensors") from None
    with path.open("rb") as file:
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path.name}: not a whole safetensors file: {error}") from None
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    weights = {}
    for key, entry in header.items():
        shape, dtype = tuple(entry["shape"]), _dtype(path, key, entry["dtype"])
        offset = 8 + size + entry["data_offsets"][0]
        weights[key] = StoredArray(shape, dtype, partial(_read, path, dtype, offset, shape, None))
    return weights


def _dtype(path: Path, key: str, name: str) -> np.dtype:
    kind, bits, rest = re.fullmatch(r"([A-Z]+)(\d*)(.*)", name).groups()  # pyright: ignore
    try:
        return jnp.dtype(f"{DTYPE_NAMES[kind]}{bits}{rest.lower()}")
    except (KeyError, TypeError):
        raise ValueError(f"{path.name}: {key}: expected floating numbers, got {name}") from None


def _read(
    path: Path,
    dtype: np.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    part: slice | EllipsisType,
) -> np.ndarray:
    """Reads an array or a part of its first axis from a file.

    The array is contiguous or has strides, which are given in elements. It gets its own memory
    pages, which return to the system when it is freed. In malloc's heap, freed arrays would leave
    gaps between those that stay.
    """
    if part is not ...:
        start, stop, _ = part.indices(shape[0])
        of_first_axis = int(np.prod(shape[1:])) if strides is None else strides[0]
        offset += start * of_first_axis * dtype.itemsize
        shape = stop - start, *shape[1:]
    last = sum(s * (n - 1) for s, n in zip(strides or (), shape, strict=bool(strides)))
    count = 1 + last if strides and all(shape) else int(np.prod(shape))
    if not count:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(pages) != len(pages):
            raise OSError(f"{path.name} has become shorter")
    flat = np.frombuffer(pages, dtype)
    if strides is None:
        return flat.reshape(shape)
    items = [stride * flat.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, items)


def _torch_weights(path: Path) -> dict[str, StoredArray]:
    """Opens a file of torch.save. Files from before PyTorch 1.6 are read as a whole."""
    if not zipfile.is_zipfile(path):
        return {**_model_entry(read_pth(path))}
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise ImportError(f"{path.name} needs PyTorch: pip install torch") from None
    with FakeTensorMode():  # tensors without values that know their place in the file
        return {key: _stored(path, value) for key, value in _model_entry(read_pth(path)).items()}


def _model_entry(content: dict[str, Any]) -> Mapping[str, Any]:
    """Returns the model's weights, which training programs save in an entry beside other data."""
    entries = (content[name] for name in MODEL_ENTRIES if isinstance(content.get(name), Mapping))
    return next(entries, content)


def _stored(path: Path, value: Any) -> Any:
    """Converts a tensor to a stored array, and leaves other values and dtypes unchanged."""
    try:
        dtype = dtype_of(value)
    except ValueError:
        return value
    offset = value.untyped_storage()._checkpoint_offset + value.storage_offset() * dtype.itemsize
    shape = tuple(value.shape)
    return StoredArray(shape, dtype, partial(_read, path, dtype, offset, shape, value.stride()))


def _orbax_weights(path: Path) -> dict[str, StoredArray]:
    """Opens the leaves of an orbax tree, with keys joined by dots and without Flax's `params`."""
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ImportError(f"{path.name} needs orbax: pip install orbax-checkpoint") from None
    checkpointer = ocp.PyTreeCheckpointer()
    try:
        tree = checkpointer.metadata(path.resolve()).item_metadata.tree  # pyright: ignore
    except Exception as error:  # from tensorstore, msgpack, JSON or the file system
        raise ValueError(f"{path.name}: not a whole folder of orbax: {error}") from None

    def restore(at: tuple[str, ...], part: slice | EllipsisType) -> np.ndarray:
        item: Any = 0
        args: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(at):
            item, args = {key: item}, {key: args}
        restored = checkpointer.restore(
            path.resolve(),
            args=ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True),
        )
        for key in at:
            restored = restored[key]
        return np.asarray(restored)[part]

    return {
        ".".join(at).removeprefix("params."): StoredArray(
            tuple(leaf.shape), jnp.dtype(leaf.dtype), partial(restore, at), reads_parts=False
        )
        for at, leaf in _leaves(tree, path.name)
    }


def _leaves(
    tree: Mapping[str, Any], name: str, at: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, name, (*at, key))
        elif not hasattr(value, "shape"):
            raise ValueError(
                f"{name}: expected dictionaries of arrays, got a {type(value).__name__} in "
                f"{'.'.join((*at, key))}; save the weights alone, without the optimizer's state"
            )
        else:
            yield (*at, key), value
