"""The command `twinscan export`: writes a run's weights for its twin and compares the two."""

if __name__ == "__main__":
    from twinscan.command_line import run_module

    run_module("train.command.export")

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jax_models import LanguageModel
from jax_models.options import checked_options
from jax_models.weights.transfer import stored_weights
from train.command.convert import write_file
from train.process.files import whole
from train.run.folder import Run
from train.trainer.mesh import no_mesh
from twinscan.command_line import CommandLineError, parse
from twinscan.heartbeat import doing

PROG = "python -m train.command.export"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write the weights of a run under the keys of its PyTorch twin, and compare the two models."""

    run: Path
    """The folder of the run."""
    out: Path | None = None
    """The safetensors file to write, which must not exist yet. By default, twin.safetensors in the
    run's folder."""


@checked_options
def export(model: LanguageModel, path: Path) -> None:
    """Writes the model's weights as a safetensors file of the twin's state_dict.

    The weights may be sharded. Each is gathered in the memory of the host and written before the
    next.
    """
    with whole(path) as partial, doing(f"writing {path}"):
        write_file(partial, stored_weights(model))


def logit_errors(model: LanguageModel, path: Path) -> tuple[float, float]:
    """The errors of the model and of the twin, both in float32, against the twin in float64.

    An error is the root mean square of the differences between the logits for random tokens,
    divided by the root mean square of the float64 logits.

    Raises:
        ImportError: torch is not installed.

    """
    import torch
    from safetensors.torch import load_file

    config = model.config
    twins = importlib.import_module(config.twin)
    twin = getattr(twins, type(config).__name__.removesuffix("Config")).from_config(config)
    twin.load_state_dict(load_file(path))
    tokens = np.random.default_rng(0).integers(
        0, config.vocab_size, (8, min(model.context_length or 128, 128))
    )
    with torch.no_grad():
        twin_logits = twin.eval()(torch.tensor(tokens))[0].numpy()
        oracle = twin.double()(torch.tensor(tokens))[0].numpy()

    # Build a model that computes in float32 around the same parameters, which may be sharded.
    @jax.jit
    def float32_logits(params: nnx.State, tokens: jax.Array) -> jax.Array:
        built = config.build(rngs=nnx.Rngs(0))
        nnx.update(built, params)
        views = {"deterministic": True, "max_length": tokens.shape[1]}
        return nnx.view(built, raise_if_not_found=False, **views)(tokens)[0]

    with jax.default_matmul_precision("highest"):
        logits = float32_logits(nnx.state(model, nnx.Param), tokens)
    scale = np.linalg.norm(oracle)
    jax_error, twin_error = (
        float(np.linalg.norm(each - oracle) / scale) for each in (np.asarray(logits), twin_logits)
    )
    return jax_error, twin_error


def describe_errors(model: LanguageModel, path: Path) -> str:
    """A line about the comparison with the twin."""
    try:
        with doing("comparing the logits with those of the PyTorch twin"):
            jax_error, twin_error = logit_errors(model, path)
    except ImportError:
        return "torch is not installed: the twin was not run"
    return (
        f"errors of the float32 logits against the float64 twin: JAX {jax_error:.1e}, "
        f"the torch twin itself {twin_error:.1e}"
    )


@no_mesh()
def main(args: Sequence[str], prog: str = PROG) -> None:
    """Exports a run and compares its model with the twin."""
    arguments = parse(Arguments, args, prog=prog)
    path = arguments.out or arguments.run / "twin.safetensors"
    if path == arguments.out and path.is_file():
        raise CommandLineError(f"--out: {path} exists already; choose a new name, or remove it")
    run = Run.open(arguments.run)
    model = run.model()
    export(model, path)
    print(f"wrote {path}")
    print(describe_errors(model, path))
