"""`python -m benchmarks.full_size`: loads, runs and exports hybrids of published sizes.

No published weights are needed: transformers writes a folder of shards in bfloat16, with random
weights. The model is loaded within its own size and that of its largest tensor, generates, and is
exported bit for bit. The errors of its logits in bfloat16 and float32 are relative to those of
transformers in float32, root mean square. Needs 6 GB of memory and 4 GB of disk.
"""

import argparse
import dataclasses
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.problem import relative_error
from benchmarks.report.store import versions
from jax_models.models.hf import HFConfig, published_models

SMALL = {"vocab_size": 64, "features": 64, "mlp_features": 64, "head_features": 4}
"""Sizes of a small model, which is loaded first, so that what it imports does not count."""
SHARD, MIB = "200MB", 2**20
TOKENS = np.random.default_rng(0).integers(0, 64, (1, 64))
NEW_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a model. Sizes are in MiB."""

    model: str
    parameters: int
    shards: int
    size: float
    largest_tensor: float
    load_peak: float
    """The most memory while the model was loaded, above that before."""
    load_seconds: float
    generated: int
    """The number of tokens that were generated."""
    exported_equal: bool
    """Whether `twinscan convert` writes the keys and bits that transformers wrote."""
    error_bfloat16: float
    error_float32: float
    transformers_error_bfloat16: float

    @property
    def passes(self) -> bool:
        """Whether the memory is within its bound, and the export equal."""
        return self.load_peak <= self.size + self.largest_tensor and self.exported_equal


def write_model(config: HFConfig, folder: Path) -> tuple[np.ndarray, ...]:
    """Saves a random model by transformers. Returns its logits in bfloat16 and float32.

    Matrices keep the size of their inputs, and vectors are near their initial values. As in the
    published files of Qwen3.5, its decays and the norms behind them are in float32.
    """
    import torch

    # From the module itself, because pyright needs as long for all of transformers as for us.
    from transformers.models.auto import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = AutoConfig.for_model(**config.to_hf(), dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(fields, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
                parameter.data = parameter.float()
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder, max_shard_size=SHARD)
        tokens = torch.tensor(TOKENS)
        return model(tokens).logits.float().numpy(), model.float()(tokens).logits.numpy()


def load_and_generate(small: Path, folder: Path) -> dict[str, Any]:
    """Loads a model, generates some tokens, and computes its logits in bfloat16."""
    import jax

    from jax_models import generate, load_pretrained

    load_pretrained(small)
    before, start = reset_peak(), time.perf_counter()
    model: Any = load_pretrained(folder)
    seconds, used = time.perf_counter() - start, memory("VmHWM") - before
    tokens = generate(model, TOKENS[:, :9], NEW_TOKENS, key=jax.random.key(0), temperature=0)
    return {
        "load_seconds": seconds,
        "load_peak": used,
        "generated": int(np.asarray(tokens).size),
        "logits": logits_of(model),
    }


def memory(name: str) -> float:
    """The memory of this process in MiB: `VmRSS` is that in use, and `VmHWM` its peak.

    The peak of `getrusage` would include that of the process that started this one.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def reset_peak() -> float:
    """Makes the memory in use the peak of this process, and returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def load_in_float32(folder: Path) -> np.ndarray:
    """Loads a model with parameters in float32, and computes its logits."""
    from jax_models import load_pretrained

    return logits_of(load_pretrained(folder, param_dtype="float32"))


def logits_of(model: Any) -> np.ndarray:
    """The logits of `TOKENS`, in float32."""
    import jax
    from flax import nnx

    graphdef, state = nnx.split(nnx.view(model, max_length=TOKENS.shape[1]))
    run = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[0])
    return np.asarray(run(state, TOKENS), np.float32)


def export(folder: Path, target: Path) -> bool:
    """Exports a model, and returns whether all keys and bits are those of the first folder."""
    from jax_models.weights.checkpoint import open_checkpoint
    from train.command import convert

    convert.main(["--from", str(folder), "--to", str(target)])
    before, after = open_checkpoint(folder).weights, open_checkpoint(target).weights
    return before.keys() == after.keys() and all(
        np.asarray(after[key]).tobytes() == np.asarray(array).tobytes()
        for key, array in before.items()
    )


def measure(name: str, config: HFConfig, folder: Path) -> Figures:
    """Measures a model, each step in a process of its own."""
    from jax_models.weights.checkpoint import open_checkpoint

    whole, small, exported = (folder / part for part in ("whole", "small", "exported"))
    alone(write_model, dataclasses.replace(config, **SMALL), small)
    in_bfloat16, in_float32 = alone(write_model, config, whole)
    weights = open_checkpoint(whole).weights.values()
    counts = [int(np.prod(weight.shape)) for weight in weights]
    sizes = [count * weight.dtype.itemsize for count, weight in zip(counts, weights, strict=True)]
    found = alone(load_and_generate, small, whole)
    return Figures(
        model=name,
        parameters=sum(counts),
        shards=len([*whole.glob("*.safetensors")]),
        size=sum(sizes) / MIB,
        largest_tensor=max(sizes) / MIB,
        exported_equal=alone(export, whole, exported),
        error_bfloat16=relative_error(found.pop("logits"), in_float32),
        error_float32=relative_error(alone(load_in_float32, whole), in_float32),
        transformers_error_bfloat16=relative_error(in_bfloat16, in_float32),
        **found,
    )


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a new process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def main() -> int:
    """Measures all models, prints the figures and writes them. Returns 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_size", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    found = []
    for name, config in published_models().items():
        with TemporaryDirectory() as folder:
            found.append(measure(name, config, Path(folder)))
        print(found[-1], flush=True)
    if options.json:
        figures = {"models": [*map(dataclasses.asdict, found)]}
        options.json.write_text(json.dumps({"with": versions(), **figures}, indent=1) + "\n")
    return 0 if all(each.passes for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
