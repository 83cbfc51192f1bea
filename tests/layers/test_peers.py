"""Compares RWKV-6, RWKV-7 and the delta rule with packages of other authors."""

import copy
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref
import torch_ref.layers.rwkv7 as torch_rwkv7
from jax_models import (
    LanguageModel,
    RWKV6LanguageModelConfig,
    RWKV7LanguageModelConfig,
    generate,
    ops,
    to_torch,
)
from parity_tests import assert_parity
from parity_tests.engine.bounds.tolerance import K, Tensors, floor, relative_errors
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype
from parity_tests.registry import Case

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

SIZES: dict[str, Any] = {"vocab_size": 50, "features": 128, "num_layers": 3}
CONFIGS = {
    "RWKV-6": RWKV6LanguageModelConfig(
        **SIZES, head_size=32, hidden_features=176, mix_rank=16, decay_rank=24
    ),
    "RWKV-7": RWKV7LanguageModelConfig(
        **SIZES, decay_rank=24, rate_rank=32, value_rank=16, gate_rank=40
    ),
}
PROMPT = np.random.default_rng(0).integers(0, 50, 37)
HALF = 20
TEXT = 64

RWKV_PACKAGE = """
import sys
import numpy as np, torch
from rwkv.model import RWKV

given = np.load(sys.argv[2])
half = [torch.from_numpy(given[f"state {i}"]) for i in range(len(given.files) - 2)]
model = RWKV(model=sys.argv[1], strategy="cpu fp32")
logits, state = model.forward(given["prompt"].tolist(), None, full_output=True)
results = {"logits": logits} | {f"state {i}": x.clone() for i, x in enumerate(state)}
results["rest"], _ = model.forward(given["rest"].tolist(), half, full_output=True)
text = [int(logits[-1].argmax())]
while len(text) < int(sys.argv[4]):
    logits, state = model.forward(text[-1:], state)
    text.append(int(logits.argmax()))
np.savez(sys.argv[3], text=text, **{name: x.numpy() for name, x in results.items()})
"""


def named(logits: Any, states: Iterable[Any]) -> Tensors:
    """Logits and states of one text, named and shaped as in the package.

    The package has 3 states for each layer: two of (features,) and one of (heads, N, N).
    """
    tensors = {"logits": logits, **{f"state {i}": x for i, x in enumerate(states)}}
    return {name: np.asarray(x)[0] for name, x in tensors.items()}


def of_model(model: LanguageModel, tokens: np.ndarray) -> Tensors:
    logits, state = jax.jit(model.__call__)(tokens[None])
    return named(logits, jax.tree.leaves(state.layers))


def of_twin(
    twin: torch.nn.Module, tokens: np.ndarray, before: Any = None, *, as_package: bool = False
) -> tuple[Tensors, Any]:
    """The twin's results and its state.

    With `as_package`, e^{−1/2} is 0.606531 as in the package, which is 5.6e-7 more.
    """
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if as_package:
            patch.setattr(torch_rwkv7, "math", SimpleNamespace(exp=lambda _: 0.606531))
        logits, after = twin(torch.tensor(tokens)[None], before)
    return named(logits, [x for block in after for x in block]), after


def of_package(version: str, weights: Path, given: Tensors) -> Tensors:
    """The package's results for a checkpoint, computed in another process."""
    arguments = weights.with_suffix(".given.npz"), weights.with_suffix(".results.npz")
    np.savez(arguments[0], **given)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RWKV_")}
    env |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    if version == "RWKV-7":
        env["RWKV_V7_ON"] = "1"
        weights = weights.with_suffix("")
    command = [sys.executable, "-W", "ignore", "-c", RWKV_PACKAGE, weights, *arguments, str(TEXT)]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return dict(np.load(arguments[1]))


def random_case(config: Any) -> tuple[Case, torch.nn.Module]:
    """A random case and its twin, scaled so that the time mixes determine the text.

    Otherwise, a greedy text would soon repeat one token.
    """
    build_twin = getattr(torch_ref, type(config).__name__.removesuffix("Config")).from_config
    case = Case("", partial(build_twin, config), config.build, "blinkdl", "")
    twin = case.build_twin()
    for name, parameter in twin.named_parameters():
        if re.search(r"ln\w+\.weight", name):
            parameter.data += 1
        elif name.endswith("att.output.weight"):
            parameter.data *= 4
        parameter.data = torch.from_numpy(in_every_dtype(parameter.data.numpy()))
    return case, twin


@pytest.fixture(scope="module", params=CONFIGS)
def beside(request, tmp_path_factory) -> SimpleNamespace:
    """A random model in float32, its twin in float64, and the package's results and errors for it.

    The package reads the weights from `to_torch`, and our state in the middle of the prompt.
    """
    pytest.importorskip("rwkv")
    case, twin = random_case(CONFIGS[request.param])
    model = case.build_layer(twin, jnp.float32)
    export = tmp_path_factory.mktemp("beside") / "export.pth"
    torch.save({key: torch.from_numpy(value) for key, value in to_torch(model).items()}, export)
    states = {key: value for key, value in of_model(model, PROMPT[:HALF]).items() if "state" in key}
    given = {"prompt": PROMPT, "rest": PROMPT[HALF:], **states}
    package = of_package(request.param, export, given)
    rest, text = package.pop("rest"), package.pop("text")
    yardstick = errors_of_package(package, twin)
    return SimpleNamespace(model=model, twin=twin, yardstick=yardstick, rest=rest, text=text)


def assert_errs_at_most_as(yardstick: dict[str, float], errors: dict[str, float]) -> None:
    """Asserts that float32 errors are within the bound of `tolerance.py`."""
    for name, error in errors.items():
        bound = max(floor(np.float32), K * yardstick[name])
        assert error <= bound, f"{name}: {error:.1e}, where at most {bound:.1e} is allowed"


def errors_of_package(package: Tensors, twin: torch.nn.Module) -> dict[str, float]:
    """The package's errors, which may serve as bounds for ours.

    Against a twin with the package's e^{−1/2}, they are no larger than float32's rounding.
    """
    oracle, _ = of_twin(twin, PROMPT, as_package=True)
    in_float32, _ = of_twin(copy.deepcopy(twin).float(), PROMPT, as_package=True)
    errors = relative_errors(package, oracle)
    assert_errs_at_most_as(relative_errors(in_float32, oracle), errors)
    return errors


def test_logits_and_states_err_as_those_of_the_package(beside):
    """The axes of a state are (keys, values) in RWKV-6 and (values, keys) in RWKV-7."""
    oracle, _ = of_twin(beside.twin, PROMPT)
    errors = relative_errors(of_model(beside.model, PROMPT), oracle)
    assert_errs_at_most_as(beside.yardstick, errors)


def test_the_package_continues_from_our_state(beside):
    _, half = of_twin(beside.twin, PROMPT[:HALF])
    oracle, _ = of_twin(beside.twin, PROMPT[HALF:], half, as_package=True)
    error = relative_errors({"logits": beside.rest}, {"logits": oracle["logits"]})
    assert_errs_at_most_as(beside.yardstick, error)


def test_the_greedy_text_is_that_of_the_package(beside):
    text = generate(beside.model, PROMPT[None], TEXT, key=jax.random.key(0), temperature=0)
    assert len({*beside.text.tolist()}) > 10
    np.testing.assert_array_equal(text[0], beside.text)


class Peer(torch.nn.Module):
    """A function of transformers that scales the query by (key size)^−1/2 itself.

    It would compute in float32 for any input; here, it computes float64 inputs in float64.
    """

    def __init__(self, form: str):
        super().__init__()
        module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        function = getattr(module, f"{form}_kimi_delta_attention")
        self.function = inspect.unwrap(function)  # not an installed kernel

    def forward(self, q, k, v, log_decay, rate, state=None):
        with InFloat64() if q.dtype == torch.float64 else nullcontext():
            return self.function(
                q, k, v, log_decay, rate, initial_state=state, output_final_state=True
            )


def kimi_delta_attention(method, _, q, k, v, log_decay, rate, state=None):
    """A decay for each key: a = α ⊙ k, b = −βk, and βk instead of k. Its state is our transpose."""
    state = None if state is None else state.mT
    r, key = q * q.shape[-1] ** -0.5, rate[..., None] * k
    correction = jnp.exp(log_decay) * k, -key
    y, last = ops.delta_rule(r, log_decay, key, v, *correction, state, method=method)
    return y, last.mT


def steps(time: int):
    """Random queries, keys of norm 1, values, log decays, rates in (0, 1), and a state."""
    rng = np.random.default_rng(time)
    q, k, v = (rng.standard_normal((2, time, 3, size)) for size in (6, 6, 5))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -(10 ** rng.uniform(-3, 0.5, (2, time, 3, 6)))
    rate = rng.uniform(0.1, 0.9, (2, time, 3))
    state = rng.standard_normal((2, 3, 6, 5))
    return [in_every_dtype(x) for x in (q, k, v, log_decay, rate, state)]


@pytest.mark.parametrize(
    ("form", "method", "time"),
    [("recurrent", "sequential", 37), ("recurrent", "chunked", 1), ("chunk", "chunked", 131)],
)
def test_the_delta_rule_is_that_of_transformers(form, method, time):
    """Compares the outputs, the last states and the gradients of all inputs."""
    assert_parity(Peer(form), partial(kimi_delta_attention, method), *steps(time), weights=dict)
