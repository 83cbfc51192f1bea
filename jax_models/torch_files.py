"""Weights from a file of PyTorch's, without running what is in it."""

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OTHER_FILES = {
    rb"\s*<(!DOCTYPE|html|\?xml)": "a web page: download the file itself, by its raw link",
    rb"version https://git-lfs": "a Git LFS pointer: fetch the file by `git lfs pull`",
    rb".{8}\{": "a safetensors file: read it with safetensors.torch.load_file",
    rb"\x93NUMPY": "a NumPy array: read it with numpy.load",
    rb"\x89HDF": "an HDF5 file: read it with h5py.File",
    rb"GGUF": "a GGUF file: read it with gguf.GGUFReader",
    rb"\x1f\x8b": "compressed by gzip: decompress it first",
    rb"$": "empty: download it again",
}
"""What a file is that `torch.save` did not write, by how it begins."""


def read_pth(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `state_dict` in a file that `torch.save` wrote, as tensors on the CPU.

    The file is read with `weights_only=True`: it may hold tensors and plain containers. This is the
    one function of the package that needs PyTorch, which it imports when it is called.

    Raises:
        ImportError: PyTorch is not installed.
        TypeError: the path is none.
        OSError: the file cannot be opened.
        ValueError: the file would run code, is damaged, is of another format (the message names
            what reads it), or holds no `state_dict`.

    """
    try:
        import torch
    except ImportError:
        raise ImportError("read_pth needs PyTorch: pip install torch") from None
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of a file, got {type(path).__name__}")
    path = Path(path)
    with path.open("rb") as file:
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damage shows as any of a dozen
            raise ValueError(f"{path.name}: {_reason(path, error)}") from None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{path.name}: expected a state_dict, got a {type(weights).__name__}")
    return dict(weights)


def _reason(path: Path, error: Exception) -> str:
    """Why torch cannot read the file."""
    with path.open("rb") as file:
        head = file.read(100)
    for start, what in OTHER_FILES.items():
        if re.match(start, head, re.DOTALL | re.IGNORECASE):
            return f"not a file of torch.save, it is {what}"
    if found := re.search(r"GLOBAL (\S+) was not an allowed global", str(error)):
        return (
            f"refused, it holds more than weights: {found[1]}; save model.state_dict() alone, by "
            "torch.save"
        )
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = {Path(name).name for name in archive.namelist()}
        if "constants.pkl" in names:
            return "a TorchScript file: read it with torch.jit.load(path).state_dict()"
        if any(name.endswith(".npy") for name in names):
            return "not a file of torch.save, it is an archive of NumPy: read it with numpy.load"
    lines = str(error).splitlines() or [type(error).__name__]
    return f"not a whole file of torch.save: {lines[0]:.120}"
