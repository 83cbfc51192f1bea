"""The command `twinscan convert`: writes weights in another package's layout."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("train.command.convert")

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jax_models import LanguageModel, load_pretrained
from jax_models.options import CheckedFields
from jax_models.weights.checkpoint import CONFIG, SAFETENSORS, TORCH
from jax_models.weights.layouts import params_of
from jax_models.weights.stored import StoredArray, is_floating
from jax_models.weights.transfer import stored_weights
from train.command.generation_files import (
    files_of_checkpoint,
    files_of_run,
    ids_of_checkpoint,
    ids_of_run,
)
from train.command.initial_weights import is_run
from train.command.pretrained import faults_of_checkpoint, optional_json
from train.process.files import whole
from train.run.folder import PRETRAINED, Run
from train.trainer.mesh import no_mesh
from twinscan.command_line import CommandLineError, parse
from twinscan.heartbeat import doing

PROG = "python -m train.command.convert"
MOST = 5 * 10**9
"""The largest size of one weight file in a folder, in bytes. Larger weights are split."""
ONE, PART = "model.safetensors", "model-{:05}-of-{:05}.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Arguments(CheckedFields):
    """Write the weights of a checkpoint or a run in another package's layout, or another dtype."""

    source: Annotated[Path, tyro.conf.arg(name="from")]
    """The checkpoint, as `generate --weights` takes it, or the folder of a run."""
    to: Path
    """The new file (.safetensors, .pth) or the new folder to write. In transformers' layout, the
    folder also gets a config.json."""
    layout: str | None = None
    """The layout to write, one of those in the docstring of the model's class. By default, the
    model's first."""
    param_dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    """The dtype of the written weights. By default, they keep their own."""


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Converts a checkpoint or a run and prints the result."""
    arguments = parse(Arguments, args, prog=prog)
    source, target = arguments.source, arguments.to
    if target.exists() or target.is_symlink():
        raise CommandLineError(f"--to: {target} exists; choose a new file or folder")
    run = Run.open(source) if is_run(source) else None
    if run is not None:
        model = with_param_dtype(run.model(), arguments.param_dtype)
    else:
        with faults_of_checkpoint(source), doing(f"reading {source}"):
            model = load_pretrained(source, param_dtype=arguments.param_dtype)
    layout = arguments.layout or next(iter(model.torch_layouts()))
    try:
        weights = stored_weights(model, layout)
    except ValueError as error:
        raise CommandLineError(f"--{error}") from None
    if target.suffix in SAFETENSORS + TORCH:
        with whole(target) as partial, doing(f"writing {target}"):
            write_file(partial, weights, is_torch=target.suffix in TORCH)
    else:
        with faults_of_checkpoint(source):
            known = optional_json((source if run is None else source / PRETRAINED) / CONFIG)
            ids = ids_of_checkpoint(known) if run is None else ids_of_run(run, known)
            files = files_of_checkpoint(source) if run is None else files_of_run(run, ids)
        config = config_of(model, layout, known, ids)
        if f"{layout}-file" in model.torch_layouts():  # files leave out tied weights
            weights = stored_weights(model, f"{layout}-file")
        with whole(target) as partial, doing(f"writing {target}"):
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            partial.mkdir(parents=True)
            write_folder(partial, weights, config, files)
    size = sum(array.dtype.itemsize * int(np.prod(array.shape)) for array in weights.values())
    print(f"{target}: {type(model).__name__} in layout {layout}, {size / 1e6:,.1f} MB")


def with_param_dtype(model: LanguageModel, dtype: str | None) -> LanguageModel:
    """The model with all of its floating weights in a dtype; None keeps their own."""
    if dtype is not None:
        for param in params_of(model).values():
            value = np.asarray(param.get_value())
            if is_floating(value):
                param.set_value(value.astype(dtype))
    return model


def config_of(
    model: Any, layout: str, known: Mapping[str, Any], ids: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The fields of config.json; None if the layout has no config.json.

    They include the `known` fields of the source's config.json, if it describes the same kind of
    model, and the ids of special tokens.
    """
    to_hf = getattr(getattr(model, "config", None), "to_hf", None)
    if not layout.startswith("hf") or to_hf is None:
        return None
    try:
        fields = to_hf()
    except ValueError as error:
        raise CommandLineError(f"--layout: {error}") from None
    is_same = known.get("model_type") == fields["model_type"]
    dtype = str(next(iter(stored_weights(model, layout).values())).dtype)
    return {**(known if is_same else {}), **fields, **ids, "dtype": dtype}


def write_folder(
    folder: Path,
    weights: Mapping[str, StoredArray],
    config: Mapping[str, Any] | None,
    files: Mapping[str, bytes],
) -> None:
    """Writes the weights in parts, the config, and other files."""
    parts: list[dict[str, StoredArray]] = [{}]
    size = 0
    for key, array in weights.items():
        nbytes = array.dtype.itemsize * int(np.prod(array.shape))
        if parts[-1] and size + nbytes > MOST:
            parts.append({})
            size = 0
        parts[-1][key] = array
        size += nbytes
    names = [PART.format(i + 1, len(parts)) for i in range(len(parts))] if parts[1:] else [ONE]
    for name, part in zip(names, parts, strict=True):
        write_file(folder / name, part)
    if len(parts) > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1))
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config, indent=1))
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_file(path: Path, weights: Mapping[str, StoredArray], *, is_torch: bool = False) -> None:
    """Writes one file. Safetensors are written one tensor at a time, to save memory."""
    if is_torch:
        import torch

        tensors = {key: torch_tensor(np.asarray(array)) for key, array in weights.items()}
        try:
            with path.open("wb") as file:
                torch.save(tensors, file)
        except RuntimeError as error:  # torch raises it on top of the system's error
            raise error.__context__ or error from None
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, array in weights.items():
        start, end = end, end + array.dtype.itemsize * int(np.prod(array.shape))
        header[key] = {
            "dtype": NAMES[str(array.dtype)],
            "shape": array.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def torch_tensor(array: np.ndarray) -> Any:
    """The array as a tensor. torch does not know NumPy's bfloat16."""
    import torch

    array = np.array(array, order="C")  # torch may write to it
    if array.dtype != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)


NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The names of dtypes in safetensors."""
