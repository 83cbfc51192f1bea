"""Reads a file of `torch.save` without running code from it."""

__all__ = ["read_pth"]

import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

SETTINGS = re.compile(
    r"(lightning|lightning_fabric|omegaconf|pathlib|pytorch_lightning|typing)\."
    r"|collections\.defaultdict$|builtins\.(bool|bytes|dict|float|int|list|str|tuple)$"
)
"""The classes of settings that training programs save together with weights."""
OTHER_FILES = {
    rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)*<(!DOCTYPE|html|\?xml)": (
        "a web page: download the file itself, by its raw link"
    ),
    rb"version https://git-lfs": "a Git LFS pointer: fetch the file by `git lfs pull`",
    rb".{4}\x00{4}\{": "a safetensors file: read it with safetensors.torch.load_file",
    rb"\x93NUMPY": "a NumPy array: read it with numpy.load",
    rb"\x89HDF": "an HDF5 file: read it with h5py.File",
    rb"GGUF": "a GGUF file: read it with gguf.GGUFReader",
    rb"\x1f\x8b": "compressed by gzip: decompress it first",
    rb"BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!|.{257}ustar": "an archive: unpack it first",
    rb"\x80[\x02-\x05](?!\x8a\nl\xfc\x9cF\xf9)": "a pickle of another program",
    rb"\(?[cdl](p\d|\w+(\.\w+)*)\n": "a pickle of another program",
    rb"\x08[\x01-\x1f][\x12:]": "an ONNX model: give from_onnx the result of onnx.load",
    rb"\s*[{[]\s*[]\"{}[\d-]": "a JSON text: give the file of the weights, or their folder",
    rb"\Z": "empty: download it again",
    rb"[\t\n\r -~\x80-\xff]+\Z": "a text: download the file itself",
}
"""The first bytes of files of other formats, and their descriptions in the error message."""


def read_pth(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the `state_dict` in a file of `torch.save`, as tensors on the CPU.

        >>> import torch
        >>> torch.save(torch.nn.LSTM(5, 6).state_dict(), "lstm.pth")
        >>> layer = from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), read_pth("lstm.pth"))

    The file is read with `weights_only=True`, which allows tensors and plain containers. Settings
    that PyTorch Lightning saves with the weights are left out, and none of their code runs. Apart
    from this function, the package needs PyTorch only to load such files in `load_pretrained`. The
    checksums in the file are verified, unless the file is from before PyTorch 1.6, which wrote no
    checksums.

    Raises:
        ImportError: PyTorch is not installed.
        TypeError: `path` is not a path.
        OSError: the file cannot be opened.
        ValueError: the file would run code, is damaged, has another format (the message says how to
            read it), or does not contain a `state_dict`.

    """
    try:
        import torch
    except ImportError:
        raise ImportError("read_pth needs PyTorch: pip install torch") from None
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of a file, got {type(path).__name__}")
    path = Path(path)
    # Unpickle only tensors and plain containers, and verify the checksums.
    with path.open("rb") as file:
        if _is_compressed(file):
            raise ValueError(
                f"{path.name}: refused, it is compressed, which torch.save does not do"
            )
        try:
            with torch.serialization.safe_globals(_settings(file)):
                weights = torch.load(file, map_location="cpu", weights_only=True)
            damage = _damage(file)
        except Exception as error:  # a damaged file can raise almost any error
            raise ValueError(f"{path.name}: {_reason(file, error)}") from None
    if damage:
        raise ValueError(f"{path.name}: {damage}")
    # The file may contain something other than a model's state_dict.
    if not isinstance(weights, Mapping):
        raise ValueError(f"{path.name}: expected a state_dict, got a {type(weights).__name__}")
    if not weights or not all(isinstance(key, str) for key in weights):
        raise ValueError(f"{path.name}: expected a state_dict, got a dict of keys {[*weights]}")
    if {"state", "param_groups"} <= weights.keys():
        raise ValueError(f"{path.name}: expected a state_dict of a model, got an optimizer's")
    return dict(weights)


def _is_compressed(file: BinaryIO) -> bool:
    """Whether the file is an archive with compressed members."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist())
    except Exception:  # not an archive, or a damaged one, which `_damage` reports
        return False
    finally:
        file.seek(0)


class _DroppedObject:
    """Stands in for an object whose content is dropped and whose code does not run."""

    def __new__(cls, *args):
        return OrderedDict()


def _settings(file: BinaryIO) -> list[Any]:
    """The classes in a file whose objects are replaced with `_DroppedObject`."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    is_archive = zipfile.is_zipfile(file)
    file.seek(0)
    names = get_unsafe_globals_in_checkpoint(file) if is_archive else []
    file.seek(0)
    return [(_DroppedObject, name) for name in names if SETTINGS.match(name)]


def _damage(file: BinaryIO) -> str | None:
    """Describes the damage that the checksums of an archive reveal, or None."""
    file.seek(0)
    if file.read(2) != b"PK":
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except Exception as error:  # as in torch.load
        found = str(error)
    else:
        if member is None:
            return None
        found = f"the checksum of {member} is wrong"
    return f"not a whole file of torch.save ({found}): download or save it again"


def _reason(file: BinaryIO, error: Exception) -> str:
    """Describes why torch cannot read the file."""
    if damage := _damage(file):
        return damage
    if found := re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", str(error)):
        return (
            f"refused, it holds more than weights: {found[1]}; save model.state_dict() alone, by "
            "torch.save"
        )
    file.seek(0)
    head = file.read(300)
    for start, what in OTHER_FILES.items():
        if re.match(start, head, re.DOTALL | re.IGNORECASE):
            return f"not a file of torch.save, it is {what}"
    if head.startswith(b"PK"):
        with zipfile.ZipFile(file) as archive:
            names = {Path(name).name for name in archive.namelist()}
        if "constants.pkl" in names:
            return "a TorchScript file: read it with torch.jit.load(path).state_dict()"
        if "model.weights.h5" in names:
            return (
                "not a file of torch.save, it is a Keras model: give from_keras a layer of the "
                "result of keras.models.load_model"
            )
        if any(name.endswith(".npy") for name in names):
            return "not a file of torch.save, it is an archive of NumPy: read it with numpy.load"
        if "data.pkl" not in names:
            return "not a file of torch.save, it is a zip archive: unpack it first"
    if head.startswith((b"PK", b"\x80")):
        return "not a whole file of torch.save: download or save it again"
    return f"not a file of torch.save, it begins with {head[:8]!r}"
