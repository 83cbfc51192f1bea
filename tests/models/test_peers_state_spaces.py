"""Compares Mamba and FalconMamba with transformers, and reads the files of mamba_ssm.

`test_peers_hybrids.py` compares Mamba-2.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import assert_same_logits_and_gradients, assert_same_start

import train.command.convert as command
from jax_models import (
    Mamba2LanguageModelConfig,
    MambaLanguageModelConfig,
    from_torch,
    generate,
    load_pretrained,
    to_torch,
)
from jax_models.models.state_space import StateSpaceConfig
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "state_size": 5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MAMBA2, MAMBA, FALCON = "mamba2", "mamba", "falcon_mamba"
MODELS: dict[str, tuple[type[StateSpaceConfig], dict[str, Any]]] = {
    MAMBA2: (
        Mamba2LanguageModelConfig,
        {"num_heads": 8, "head_dim": 4, "n_groups": 1, "chunk_size": 16},
    ),
    MAMBA: (MambaLanguageModelConfig, {"time_step_rank": 3}),
    FALCON: (MambaLanguageModelConfig, {"mixer_rms_eps": 1e-3, "tie_word_embeddings": False}),
}
"""For each `model_type`, the class of our config and the sizes of a model."""
OTHERS: dict[str, Any] = {
    "conv_kernel": 3,
    "use_bias": True,
    "use_conv_bias": False,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": True,
}
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 70))  # longer than a chunk of 64 steps


def built(kind: str, **options: Any) -> Any:
    """A random model in float64."""
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[kind][1] | options)
    with InFloat64():
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
        draw = rng.standard_normal(tuple(parameter.shape)) * fan_in**-0.5
        draw = draw + ("norm" in name)
        parameter.data = torch.from_numpy(in_every_dtype(draw))
    return model


def config_of(model: Any) -> StateSpaceConfig:
    """Our config of a model of transformers."""
    config, _ = MODELS[model.config.model_type]
    return config.from_hf(model.config.to_dict())


def ported(weights: Any, config: Any, param_dtype: Any = jnp.float64) -> Any:
    """The model of a config with these weights."""
    model = config.build(param_dtype=param_dtype, rngs=nnx.Rngs(0))
    return from_torch(model, weights)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MAMBA, {}),
        (MAMBA, OTHERS | {"tie_word_embeddings": False}),
        (FALCON, OTHERS | {"expand": 16, "intermediate_size": 24}),  # as FalconMamba-7B has them
    ],
)
def test_logits_and_gradients_are_those_of_transformers(kind, options):
    model = built(kind, **options)
    config = config_of(model)
    call_twin = lambda model, tokens: model(tokens, use_cache=False).logits  # noqa: E731

    def load(weights, **options):
        return ported(weights, config, **options)

    assert_same_logits_and_gradients(model, load, TOKENS, "hf", call_twin)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (MAMBA, {"time_step_scale": 2.0, "rescale_prenorm_residual": True}),
        (MAMBA, {"time_step_init_scheme": "constant"}),
    ],
)
def test_parameters_start_as_in_transformers(kind, options):
    config, sizes = MODELS[kind]
    sizes = SIZES | sizes | {"hidden_size": 64} | options
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **sizes)
    )
    config = config.from_hf(original.config.to_dict())
    assert_same_start(to_torch(config.build(rngs=nnx.Rngs(0))), original.state_dict())


@pytest.mark.parametrize("kind", [MAMBA, FALCON])
def test_a_folder_makes_the_round_trip(kind, tmp_path, monkeypatch):
    """Greedy tokens are those of transformers, which loads what is exported."""
    monkeypatch.chdir(tmp_path)
    model = built(kind).float()
    model.save_pretrained("hf", max_shard_size="10KB")
    prompt = TOKENS[:, :9]
    theirs = model.generate(torch.as_tensor(prompt), do_sample=False, max_new_tokens=24)
    ours = generate(load_pretrained("hf"), prompt, 24, key=jax.random.key(0), temperature=0)
    np.testing.assert_array_equal(ours, theirs[:, 9:])
    command.main(["--from", "hf", "--to", "back"])
    read, report = type(model).from_pretrained("back", output_loading_info=True)
    assert not any(report.values()), report
    assert read.config.to_diff_dict() == model.config.to_diff_dict()
    for key, array in model.state_dict().items():
        assert torch.equal(read.state_dict()[key], array), key


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_does_not_rescale_what_is_exported(kind, tmp_path, monkeypatch):
    """A fault of transformers 5.24: it divides output projections that it loads by √num_layers."""
    monkeypatch.chdir(tmp_path)
    model = built(kind, rescale_prenorm_residual=True).float()
    model.save_pretrained("hf")
    command.main(["--from", "hf", "--to", "back"])
    expected = model.backbone.layers[0].mixer.out_proj.weight
    scaled, exported = (
        type(model).from_pretrained(folder).backbone.layers[0].mixer.out_proj.weight
        for folder in ("hf", "back")
    )
    assert torch.equal(exported, expected)
    torch.testing.assert_close(scaled, expected / 3**0.5)


@pytest.mark.parametrize("kind", [MAMBA, FALCON])
def test_a_second_piece_of_transformers_forgets_the_state(kind):
    """A fault of transformers 5.24 (47087): pieces equal the whole text in ours alone."""
    model = built(kind).float()
    ours = ported(dict(model.state_dict()), config_of(model), jnp.float32)
    expected = model(torch.as_tensor(TOKENS), use_cache=False).logits[:, 35:].detach().numpy()
    first, second = TOKENS[:, :35], TOKENS[:, 35:]
    before = model(torch.as_tensor(first), use_cache=True)
    theirs = model(torch.as_tensor(second), cache=before.cache).logits.detach().numpy()
    _, state = ours(jnp.asarray(first))
    found, _ = ours(jnp.asarray(second), state)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)
    assert np.abs(theirs - expected).max() > 0.1 * scale


@pytest.mark.parametrize(("kind", "layer"), [(MAMBA, None), (MAMBA2, {"layer": "Mamba2"})])
def test_a_file_of_mamba_ssm_is_read(kind, layer, tmp_path):
    """Its config.json says only what differs from mamba_ssm's defaults."""
    model = built(kind).float()
    weights = {
        key.replace("backbone.embeddings", "backbone.embedding"): value
        for key, value in model.state_dict().items()
    }
    torch.save(weights, tmp_path / "pytorch_model.bin")
    fields = {"d_model": 16, "n_layer": 3, "vocab_size": 45, "pad_vocab_size_multiple": 10}
    fields |= {"ssm_cfg": layer, "rms_norm": True, "residual_in_fp32": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = load_pretrained(tmp_path)
    expected = model(torch.as_tensor(TOKENS), use_cache=False).logits.detach().numpy()
    np.testing.assert_allclose(
        ours(jnp.asarray(TOKENS))[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )
    wrong = {"attn_layer_idx": [1], "d_intermediate": 8, "rms_norm": False}
    for name, value in (wrong | {"ssm_cfg": {"rmsnorm": False}}).items():
        (tmp_path / "config.json").write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=rf"^config.json: {name}[.a-z]*: expected"):
            load_pretrained(tmp_path)
