"""Compares Griffin with transformers' RecurrentGemma and DeepMind's recurrentgemma."""

import dataclasses
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import assert_same_logits_and_gradients, assert_same_start

from jax_models import GriffinLanguageModelConfig, from_weights, to_torch
from parity_tests.engine.bounds.tolerance import K, floor, rms
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype
from train.command.pretrained import read_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

SIZES: dict[str, Any] = {"vocab_size": 50, "features": 32, "mlp_features": 40, "num_heads": 4}
CONFIGS = {
    "as RecurrentGemma": GriffinLanguageModelConfig(
        **SIZES, num_layers=5, recurrent_features=32, window=8
    ),
    "other options": GriffinLanguageModelConfig(
        **SIZES,
        num_layers=4,
        recurrent_features=48,
        num_kv_heads=2,
        window=5,
        kernel_size=3,
        block_types=("attention", "recurrent"),
        rotary_fraction=1.0,
        rope_theta=100.0,
        attention_bias=True,
        activation="gelu",
        epsilon=1e-3,
        logits_soft_cap=5.0,
    ),
}
LIKE_DEEPMINDS = CONFIGS["as RecurrentGemma"]
TIME = 21
TOKENS = np.random.default_rng(0).integers(1, 50, (2, TIME))


def randomise(module: torch.nn.Module) -> None:
    """Draws matrices that keep the scale of their inputs, and biases that are not negligible."""
    rng = np.random.default_rng(0)
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[-2] if "_gate_weight" in name else parameter.shape[-1]
        scale = fan_in**-0.5 if parameter.ndim > 1 else 0.5
        draw = torch.from_numpy(in_every_dtype(scale * rng.standard_normal(parameter.shape)))
        parameter.data = draw.to(parameter.dtype)


def hf_config(config: GriffinLanguageModelConfig) -> Any:
    transformers = pytest.importorskip("transformers")
    activations = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
    return transformers.RecurrentGemmaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.features,
        num_hidden_layers=config.num_layers,
        intermediate_size=2 * config.mlp_features,
        lru_width=config.recurrent_features,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        attention_window_size=config.window,
        conv1d_width=config.kernel_size,
        block_types=list(config.block_types),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_fraction,
        },
        attention_bias=config.attention_bias,
        hidden_activation=activations[config.activation],
        rms_norm_eps=config.epsilon,
        logits_soft_cap=config.logits_soft_cap,
        pad_token_id=None,
    )


@pytest.fixture(scope="module", params=CONFIGS)
def hf(request) -> tuple[GriffinLanguageModelConfig, torch.nn.Module]:
    """A random RecurrentGemma in float64, including the frequencies of the angles."""
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[request.param]
    with InFloat64():
        model = transformers.RecurrentGemmaForCausalLM(hf_config(config)).double().eval()
    randomise(model)
    return config, model


def logits_of(model: torch.nn.Module, tokens: np.ndarray, **options: Any) -> np.ndarray:
    """The logits of transformers' model, in float64 even where it would cast to float32."""
    with InFloat64(), torch.no_grad():
        return model(torch.as_tensor(tokens), **{"use_cache": False, **options}).logits.numpy()


def assert_near_each_other(what: str, ours, original, exact) -> None:
    """Asserts that neither of two float32 results exceeds the bound from the other's error."""
    exact = np.asarray(exact)
    errors = [rms(np.asarray(a, np.float64) - exact) / rms(exact) for a in (ours, original)]
    bound = max(floor(np.float32), K * min(errors))
    assert max(errors) <= bound, f"{what}: ours and original err by {errors}"


def test_logits_and_gradients_are_those_of_transformers(hf):
    config, model = hf
    load = partial(from_weights, config=config)
    call_twin = lambda model, tokens: model(tokens, use_cache=False).logits  # noqa: E731
    assert_same_logits_and_gradients(model, load, TOKENS, "hf", call_twin)


def test_a_folder_of_transformers_is_read(hf, tmp_path):
    """The folder has several files, no tied head, and a config.json that determines the model."""
    config, model = hf
    model.float().save_pretrained(tmp_path, max_shard_size="20KB")
    model.double()
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    port = read_model(tmp_path)
    assert port.config == config
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        original = again(torch.tensor(TOKENS), use_cache=False).logits.numpy()
    assert_near_each_other("logits", port(TOKENS)[0], original, logits_of(model, TOKENS))


@pytest.fixture(scope="module")
def deepminds() -> Any:
    """Imports recurrentgemma without its type checks, which need an old typeguard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typeguard.typechecked", lambda function: function)
        package = pytest.importorskip("recurrentgemma", exc_type=ImportError)
        import_module("recurrentgemma.torch")
    return package


def deepminds_config(package: Any, config: GriffinLanguageModelConfig = LIKE_DEEPMINDS) -> Any:
    kinds = package.common.TemporalBlockType
    return package.common.GriffinConfig(
        vocab_size=config.vocab_size,
        width=config.features,
        mlp_expanded_width=config.mlp_features,
        num_heads=config.num_heads,
        block_types=tuple(kinds[kind.upper()] for kind in config.mixings),
        embeddings_scale_by_sqrt_dim=config.scale_embeddings,
        attention_window_size=config.window - 1,
        logits_soft_cap=config.logits_soft_cap,
        lru_width=config.recurrent_features,
    )


RESTARTS = np.zeros(TOKENS.shape, bool)
RESTARTS[0, 9] = RESTARTS[1, [2, 15]] = True
POSITIONS = np.stack([np.r_[:9, :12], np.r_[:2, :13, :6]])


@pytest.mark.parametrize("options", [{}, {"scale_embeddings": False, "logits_soft_cap": 0.0}])
def test_recurrentgemma_in_torch_agrees_on_packed_documents(deepminds, options):
    """Compares logits and gradients, with the keys of its PyTorch checkpoints."""
    config = dataclasses.replace(LIKE_DEEPMINDS, **options)
    sizes = deepminds_config(deepminds, config)
    model = deepminds.torch.Griffin(sizes, gradient_checkpointing=False)
    randomise(model.double())
    assert_same_logits_and_gradients(
        model,
        partial(from_weights, config=config),
        TOKENS,
        "deepmind-torch",
        call=lambda port, tokens: port(tokens, reset=RESTARTS)[0],
        call_twin=lambda model, tokens: model(tokens, torch.tensor(POSITIONS))[0],
    )


def test_parameters_start_as_in_recurrentgemma_in_torch(deepminds):
    """Its Flax version draws block-diagonal gates and the MLPs' first matrices more narrowly."""
    sizes = {"vocab_size": 200, "features": 64, "mlp_features": 96, "recurrent_features": 128}
    config = dataclasses.replace(LIKE_DEEPMINDS, **sizes)
    torch.manual_seed(0)
    original = deepminds.torch.Griffin(deepminds_config(deepminds, config))
    original.reset_parameters()
    ours = to_torch(config.build(rngs=nnx.Rngs(0)), "deepmind-torch")
    assert_same_start(ours, original.state_dict())


def test_recurrentgemma_in_flax_agrees(deepminds):
    """Loads the tree of its parameters. Its softmax is in float32."""
    model = deepminds.jax.Griffin(deepminds_config(deepminds), gradient_checkpointing=False)
    positions = np.broadcast_to(np.arange(TIME), TOKENS.shape)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), TOKENS, positions)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda p: jnp.asarray(p + 0.3 * rng.standard_normal(p.shape), jnp.float32), params
        )
        original, _ = model.apply(params, TOKENS, positions)
        params = jax.device_get(params)
        told = from_weights(params).config
        assert told == dataclasses.replace(LIKE_DEEPMINDS, window=2049)
        port = from_weights(params, LIKE_DEEPMINDS)
        logits, _ = port(TOKENS)
    with jax.enable_x64(True):
        exact, _ = from_weights(params, LIKE_DEEPMINDS, param_dtype=jnp.float64)(TOKENS)
    assert_near_each_other("logits", logits, original, exact)
