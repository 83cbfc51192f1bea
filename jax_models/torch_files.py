"""Weights from a file of PyTorch's, without running what is in it."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_pth(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `state_dict` in a file that `torch.save` wrote, as tensors on the CPU.

    The file is read with `weights_only=True`: it may hold tensors and plain containers. This is the
    one function of the package that needs PyTorch, which it imports when it is called.

    Raises:
        ImportError: PyTorch is not installed.
        OSError: the file cannot be opened.
        ValueError: the file would run code, is damaged, or holds no `state_dict`.

    """
    try:
        import torch
    except ImportError:
        raise ImportError("read_pth needs PyTorch: pip install torch") from None
    name = Path(path).name
    with Path(path).open("rb") as file:
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            lines = str(error).splitlines()
            reason = next((line.strip() for line in lines if "WeightsUnpickler" in line), error)
            raise ValueError(f"{name}: refused, it holds more than weights: {reason}") from None
        except Exception as error:  # damage shows as any of a dozen
            raise ValueError(f"{name}: not a whole file of torch.save: {error!r}") from None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{name}: expected a state_dict, got a {type(weights).__name__}")
    return dict(weights)
