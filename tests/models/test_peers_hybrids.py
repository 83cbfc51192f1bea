"""Compares the hybrids, Mamba-2, xLSTM and RecurrentGemma with transformers."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from optax import softmax_cross_entropy_with_integer_labels
from peers import (
    assert_close,
    assert_same_logits_and_gradients,
    assert_same_start,
    call_transformers,
    logits_of,
    randomise,
    weights_of,
)

import torch_ref
import train.command.convert as command
from jax_models import from_weights, generate, load_pretrained, to_torch
from jax_models.models.architecture import architectures
from jax_models.models.hf import HFConfig
from jax_models.models.load import config_of
from parity_tests.engine.bounds.torch_rounding import InFloat64

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]
transformers = pytest.importorskip("transformers")

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
OLMO_HEADS = HEADS | {"linear_value_head_dim": 10}  # 12, 12 and 40 channels, in thirds of 22
VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
LIMITS = {"time_step_limit": (0.3, 0.8)}
HYBRID_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 16,
}
OTHERS = {"rms_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True}
OTHER_HYBRID_MAMBA2 = {
    **HYBRID_MAMBA2,
    **OTHERS,
    **LIMITS,
    "head_dim": 6,
    "num_key_value_heads": None,
    "mamba_n_groups": 4,
    "mamba_d_conv": 3,
    "mamba_expand": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 7}
GRANITE_SIZES = {
    **SIZES,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.8,
    "logits_scaling": 4.0,
    "shared_intermediate_size": 20,
    "num_local_experts": 0,
    "layer_types": [LINEAR, FULL],
}
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 2.0],
    "mlp_multipliers": [1.4, 0.7],
}
MAMBA2_SIZES = {**SIZES, "num_heads": 8, "head_dim": 4, "state_size": 5, "chunk_size": 16}
QWEN, QWEN_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
QWEN_NEXT, OLMO = "Qwen3NextForCausalLM", "OlmoHybridForCausalLM"
LFM2, LFM2_MOE, LFM3 = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm3ForCausalLM"
GRANITE, BAMBA = "GraniteMoeHybridForCausalLM", "BambaForCausalLM"
FALCON_H1, NEMOTRON_H = "FalconH1ForCausalLM", "NemotronHForCausalLM"
JAMBA, KIMI, MINIMAX = "JambaForCausalLM", "KimiLinearForCausalLM", "MiniMaxForCausalLM"
LARA, LING, ZAMBA2 = "LaraMiniForCausalLM", "BailingHybridForCausalLM", "Zamba2ForCausalLM"
NEMOTRON_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # transformers 5.24 takes it for the least Δ, which the models lack
    "n_routed_experts": 6,
    "moe_intermediate_size": 7,
    "moe_shared_expert_intermediate_size": 9,
}
JAMBA_SIZES = {
    **SIZES,
    "num_hidden_layers": 3,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_offset": 0,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
MINIMAX_SIZES = {
    **SIZES,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "block_size": 16,
    "full_attn_alpha_factor": 0.7,
    "full_attn_beta_factor": 1.5,
    "linear_attn_alpha_factor": 1.4,
    "linear_attn_beta_factor": 0.6,
    "mlp_alpha_factor": 0.8,
    "mlp_beta_factor": 1.3,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "moe_intermediate_size": 7,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
OTHER_LATENT = {
    "q_lora_rank": 6,
    "attention_bias": True,
    "rms_norm_eps": 1e-3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
}
KIMI_SIZES = {**SIZES, **LATENT, "linear_num_heads": 3, "linear_head_dim": 6}
XLSTM_SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,  # transformers takes multiples of 64 for the sizes of q, k and v in caches
    "num_hidden_layers": 2,
    "num_heads": 4,
    "qk_dim_factor": 1.0,
    "ffn_proj_factor": 0.3,
    "ffn_round_up_to_multiple_of": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
ZAMBA2_SIZES = {
    **SIZES,
    "num_hidden_layers": 4,
    "layers_block_type": [LINEAR, "hybrid", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
    "n_mamba_heads": 8,
    "mamba_d_state": 5,
    "chunk_size": 16,
    "num_mem_blocks": 2,
    "adapter_rank": 3,
}
MAMBA2, GEMMA = "Mamba2ForCausalLM", "RecurrentGemmaForCausalLM"
XLSTM = "xLSTMForCausalLM"
MODELS: dict[str, tuple[str, Any]] = {
    "Qwen3.5": (QWEN, {**SIZES, **HEADS, "head_dim": 12, "full_attention_interval": 2}),
    "Qwen3.5, other options": (
        QWEN,
        {
            **SIZES,
            **HEADS,
            **OTHERS,
            "head_dim": 6,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "layer_types": [FULL, LINEAR],
            "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 1.0},
        },
    ),
    "Qwen3.5 with experts": (
        QWEN_MOE,
        {
            **SIZES,
            **HEADS,
            **EXPERTS,
            "head_dim": 12,
            "full_attention_interval": 2,
            "shared_expert_intermediate_size": 9,
        },
    ),
    "Qwen3-Next": (
        QWEN_NEXT,
        {
            **SIZES,
            **HEADS,
            **EXPERTS,
            "head_dim": 12,
            "shared_expert_intermediate_size": 9,
            "full_attention_interval": 2,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3-Next, other options": (
        QWEN_NEXT,
        {
            **SIZES,
            **HEADS,
            **EXPERTS,
            "head_dim": 6,
            "shared_expert_intermediate_size": 9,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "layer_types": [FULL, LINEAR],
            "tie_word_embeddings": True,
        },
    ),
    "OLMo Hybrid": (OLMO, {**SIZES, **OLMO_HEADS}),
    "OLMo Hybrid, other options": (
        OLMO,
        {
            **SIZES,
            **HEADS,
            **OTHERS,
            "layer_types": [FULL, LINEAR],
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
        },
    ),
    "LFM2": (LFM2, {**SIZES, "full_attn_idxs": [1], "block_multiple_of": 4}),
    "LFM2, other options": (
        LFM2,
        {
            **SIZES,
            "layer_types": [FULL, "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "rope_parameters": {"rope_theta": 50.0},
            "tie_word_embeddings": False,
        },
    ),
    "LFM2 with experts": (
        LFM2_MOE,
        {
            **SIZES,
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", FULL, "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "LFM2 with experts, other options": (
        LFM2_MOE,
        {
            **SIZES,
            **EXPERTS,
            "layer_types": ["conv", FULL],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "LFM3": (
        LFM3,
        {
            **SIZES,
            "num_hidden_layers": 3,
            "head_dim": 6,
            "layer_types": ["conv", SLIDING, FULL],
            "sliding_window": 5,
            "conv_L_cache": 4,
        },
    ),
    "LFM3, other options": (
        LFM3,
        {
            **SIZES,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "layer_types": [FULL, SLIDING, "conv"],
            "sliding_window": 7,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 50.0},
                SLIDING: {"rope_type": "proportional", "partial_rotary_factor": 0.7},
            },
            "conv_bias": True,
            "attention_bias": True,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "tie_word_embeddings": False,
            "norm_eps": 1e-3,
        },
    ),
    "Lara Mini": (
        LARA,
        {
            **SIZES,
            **HEADS,
            **EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 6,
            "shared_expert_intermediate_size": 9,
            "layer_types": [LINEAR, SLIDING, FULL],
            "sliding_window": 5,
        },
    ),
    "Lara Mini, other options": (
        LARA,
        {
            **SIZES,
            **HEADS,
            **EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 9,
            "layer_types": [SLIDING, LINEAR],
            "sliding_window": 7,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-3,
        },
    ),
    "Granite 4": (GRANITE, {**GRANITE_SIZES, **HYBRID_MAMBA2, "position_embedding_type": "nope"}),
    "Granite 4, other options": (
        GRANITE,
        {
            **GRANITE_SIZES,
            **OTHER_HYBRID_MAMBA2,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_theta": 50.0},
        },
    ),
    "Granite 4 with experts": (
        GRANITE,
        {
            **GRANITE_SIZES,
            **HYBRID_MAMBA2,
            "intermediate_size": 7,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "Bamba": (BAMBA, {**SIZES, **HYBRID_MAMBA2, "attn_layer_indices": [1]}),
    "Bamba, other options": (
        BAMBA,
        {
            **SIZES,
            **OTHER_HYBRID_MAMBA2,
            "num_hidden_layers": 4,
            "attn_layer_indices": [0, 2],
            "mlp_bias": True,
            "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.7},
        },
    ),
    "Falcon-H1": (FALCON_H1, {**SIZES, **HYBRID_MAMBA2, **FALCON_MULTIPLIERS, "mamba_d_ssm": 24}),
    "Falcon-H1, other options": (
        FALCON_H1,
        {
            **SIZES,
            **OTHER_HYBRID_MAMBA2,
            **FALCON_MULTIPLIERS,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_theta": 50.0},
        },
    ),
    "Nemotron-H": (NEMOTRON_H, NEMOTRON_SIZES),
    "Nemotron-H, other options": (
        NEMOTRON_H,
        {
            **NEMOTRON_SIZES,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "moe_latent_size": 5,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "Jamba": (JAMBA, JAMBA_SIZES),
    "Jamba, other options": (
        JAMBA,
        {
            **JAMBA_SIZES,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "num_experts_per_tok": 1,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "MiniMax": (MINIMAX, {**MINIMAX_SIZES, "layer_types": [LINEAR, FULL]}),
    "MiniMax, other options": (
        MINIMAX,
        {
            **MINIMAX_SIZES,
            "num_hidden_layers": 3,
            "head_dim": 6,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "tie_word_embeddings": True,
        },
    ),
    "Kimi Linear": (KIMI, {**KIMI_SIZES, "layer_types": [LINEAR, FULL]}),
    "Kimi Linear, other options": (
        KIMI,
        {
            **KIMI_SIZES,
            **OTHER_LATENT,
            "layer_types": [FULL, LINEAR],
            "mlp_layer_types": ["sparse", "sparse"],
            "linear_conv_kernel_dim": 3,
        },
    ),
    "Ling 3": (
        LING,
        {
            **SIZES,
            **LATENT,
            "head_dim": 6,
            "layer_group_size": 2,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "Ling 3, other options": (
        LING,
        {
            **SIZES,
            **LATENT,
            **OTHER_LATENT,
            "head_dim": 5,
            "layer_types": [FULL, LINEAR],
            "mlp_layer_types": ["sparse", "sparse"],
            "short_conv_kernel_size": 3,
            "kda_lower_bound": -2.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "Zamba2": (
        ZAMBA2,
        {**ZAMBA2_SIZES, "use_shared_attention_adapter": True, "use_mem_rope": True},
    ),
    "Zamba2, other options": (
        ZAMBA2,
        {
            **ZAMBA2_SIZES,
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "mamba", "hybrid"],
            "num_key_value_heads": 2,
            "mamba_ngroups": 2,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "time_step_min": 0.5,
            "add_bias_linear": True,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
    "Mamba-2": (MAMBA2, {**MAMBA2_SIZES, "n_groups": 1}),
    "Mamba-2, other options": (
        MAMBA2,
        {
            **MAMBA2_SIZES,
            **LIMITS,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "xLSTM": (XLSTM, XLSTM_SIZES),
    "xLSTM, other options": (
        XLSTM,
        {
            **XLSTM_SIZES,
            "hidden_size": 24,
            "num_heads": 3,
            "qk_dim_factor": 0.5,
            "v_dim_factor": 2.0,
            "gate_soft_cap": 3.0,
            "output_logit_soft_cap": 2.0,
            "eps": 0.1,
            "norm_eps": 1e-3,
            "chunk_size": 16,
        },
    ),
    "RecurrentGemma": (
        GEMMA,
        {
            **SIZES,
            "hidden_size": 32,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "attention_window_size": 8,
        },
    ),
    "RecurrentGemma, other options": (
        GEMMA,
        {
            **SIZES,
            "num_hidden_layers": 4,
            "lru_width": 24,
            "attention_window_size": 5,
            "conv1d_width": 3,
            "block_types": ["attention", "recurrent"],
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0},
            "attention_bias": True,
            "hidden_activation": "gelu",
            "rms_norm_eps": 1e-3,
            "logits_soft_cap": 5.0,
        },
    ),
}
DEFAULTS = [name for name in MODELS if "other" not in name]
STATE_SPACES = [
    name
    for name, (kind, _) in MODELS.items()
    if kind in (GRANITE, BAMBA, FALCON_H1, NEMOTRON_H, ZAMBA2)
]
WITH_EXPERTS = [
    name
    for name, (kind, _) in MODELS.items()
    if kind in (LFM2_MOE, QWEN_MOE, QWEN_NEXT, JAMBA, KIMI, LARA, LING, MINIMAX)
]
TOKENS = np.random.default_rng(0).integers(1, 50, (2, 70))  # longer than a chunk of 64 steps
PADS = np.array([7, 0])
IS_TEXT = np.arange(TOKENS.shape[1]) >= PADS[:, None]


def padded(rows: np.ndarray) -> np.ndarray:
    """The rows without their last steps, behind as many pads on the left."""
    return np.stack([np.roll(row, pad, axis=0) for row, pad in zip(rows, PADS, strict=True)])


def built(name: str, **options: Any) -> Any:
    """A random model in float64, including the frequencies of the angles."""
    kind, fields = MODELS[name]
    model = getattr(transformers, kind)
    with InFloat64():
        config = model.config_class(**fields | options, **EAGER)
        model = model(config).double().eval()
    randomise(model)
    return model


@pytest.fixture(scope="module", params=MODELS)
def hf(request) -> Any:
    return built(request.param)


@pytest.fixture(scope="module")
def logits(hf) -> torch.Tensor:
    """The logits of the model in float64, which can be differentiated."""
    with InFloat64():
        logits = call_transformers(hf, torch.as_tensor(TOKENS))
    # RecurrentGemma keeps its states, and torch does not copy what can be differentiated.
    for module in hf.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    return logits


@pytest.fixture(scope="module")
def expected(logits) -> np.ndarray:
    return logits.detach().numpy()


@pytest.fixture
def folder(hf, tmp_path, monkeypatch) -> Path:
    """The model in float32, as transformers saves it."""
    monkeypatch.chdir(tmp_path)
    copy.deepcopy(hf).float().save_pretrained("hf", max_shard_size="5KB")
    assert len([*tmp_path.glob("hf/*.safetensors")]) > 1
    return tmp_path / "hf"


def test_logits_and_gradients_are_those_of_transformers(hf, folder, logits, expected):
    """Pads on the left have no influence. The config is that of the folder.

    The gradients are the twin's, with which the registry compares the model's.
    """
    config, weights = load_pretrained(folder).config, weights_of(hf)
    with jax.enable_x64(True):
        model = from_weights(dict(hf.state_dict()), config, param_dtype="float64")
        jax.tree.map(np.testing.assert_array_equal, to_torch(model, "hf"), weights)
        ours, _ = jax.jit(model.__call__)(padded(TOKENS), starts=PADS)
    assert_close(ours[IS_TEXT], padded(expected)[IS_TEXT])
    twin = getattr(torch_ref, type(config).__name__.removesuffix("Config"))
    twin = twin.from_config(config).double()
    twin.load_state_dict(weights)
    of_twin, _ = twin(torch.as_tensor(TOKENS))
    assert_close(of_twin.detach(), expected)
    of_twin.sin().sum().backward()
    with InFloat64():
        logits.sin().sum().backward()
    for name, parameter in hf.named_parameters():
        assert_close(twin.get_parameter(name).grad, parameter.grad.numpy(), 1e-9)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("Qwen3.5 with experts", [70, 51]),
        ("Qwen3-Next", None),
        ("Granite 4 with experts", [70, 51]),
        ("Jamba", None),
        ("Lara Mini", None),
        ("MiniMax", [70, 51]),
    ],
)
def test_the_loss_that_balances_experts_is_that_of_transformers(name, lengths):
    """It is added to that of the tokens, and padding does not count."""
    hf = built(name, output_router_logits=True, router_aux_loss_coef=0.5)
    mask = np.arange(TOKENS.shape[1]) < np.reshape(lengths or [70, 70], (2, 1))

    def call_transformers(model, tokens):
        options = {} if lengths is None else {"attention_mask": torch.as_tensor(mask).long()}
        labels = tokens.masked_fill(~torch.as_tensor(mask), -100)
        return model(tokens, labels=labels, use_cache=False, **options).loss

    def call(port, tokens):
        port = nnx.view(port, deterministic=False)
        logits, _ = port(tokens, lengths=None if lengths is None else np.asarray(lengths))
        losses = softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean(where=mask[:, 1:]) + sum(port.losses.values())

    load = partial(from_weights, config=config_of({}, hf.config.to_dict()))
    assert_same_logits_and_gradients(hf, load, TOKENS, "hf", call_transformers, call)


@pytest.mark.parametrize("hf", [*STATE_SPACES, *WITH_EXPERTS, "LFM3", "xLSTM"], indirect=True)
def test_steps_and_left_pads_are_those_of_transformers(hf, expected):
    """In transformers 5.24, biases of a Mamba-2 or a short convolution leak left pads.

    xLSTM reads the pads like other tokens.
    """
    config = config_of({}, hf.config.to_dict())
    with jax.enable_x64(True):
        model = from_weights(dict(hf.state_dict()), config, param_dtype="float64")
        model = nnx.view(model, max_length=TOKENS.shape[1], raise_if_not_found=False)
        call_step = jax.jit(model.step)
        _, state = jax.jit(model.__call__)(TOKENS[:, :-2])
        step, state = call_step(TOKENS[:, -2], state)
        last, _ = call_step(TOKENS[:, -1], state)
    assert_close(np.stack([step, last], axis=1), expected[:, -2:])
    mask = torch.as_tensor(IS_TEXT, dtype=torch.long)
    theirs, expected = logits_of(hf, padded(TOKENS), attention_mask=mask), padded(expected)
    leaks = "conv_bias" if isinstance(hf, transformers.Lfm2MoeForCausalLM) else "mamba_bias"
    if isinstance(hf, transformers.xLSTMForCausalLM) or getattr(config, leaks, False):
        departure = np.abs(theirs - expected)[0, PADS[0] :].max()
        assert departure > 0.05 * np.abs(expected).max()
    else:
        assert_close(theirs[IS_TEXT], expected[IS_TEXT])


OTHER_CACHES = ["Jamba", "Mamba-2", "Mamba-2, other options", "MiniMax", "xLSTM"]


@pytest.mark.parametrize("hf", [*STATE_SPACES, *OTHER_CACHES], indirect=True)
def test_cached_steps_of_transformers_depart_from_its_sequences(hf, expected):
    """Faults of transformers 5.24: a step forgets the limits of Δ.

    Bamba and MiniMax restart positions. A piece of several tokens forgets the state of Jamba's
    Mamba (47087), and MiniMax refuses it, unless the lowest block has full attention.
    """
    expected = expected[:, -1]
    scale = np.abs(expected).max()

    def last_piece(count: int = 1, **options: Any) -> np.ndarray:
        first, second = map(torch.as_tensor, np.split(TOKENS, [-count], axis=1))
        with InFloat64(), torch.no_grad():
            cache = hf(first, use_cache=True).cache
            return hf(second, cache=cache, **options).logits[:, -1].numpy()

    step = last_piece(position_ids=torch.tensor([[TOKENS.shape[1] - 1]]))
    limits = getattr(hf.config, "time_step_limit", [np.inf])
    if np.isfinite(limits[-1]) or getattr(hf.config, "time_step_min", 0) > 0.1:
        assert np.abs(step - expected).max() > 0.05 * scale
    else:
        assert_close(step, expected)
    if isinstance(hf, transformers.BambaForCausalLM | transformers.MiniMaxForCausalLM):
        assert np.abs(last_piece() - expected).max() > 0.01 * scale
    if isinstance(hf, transformers.MiniMaxForCausalLM):
        with pytest.raises(RuntimeError, match="size of tensor"):
            last_piece(2)
    if isinstance(hf, transformers.JambaForCausalLM):
        assert np.abs(last_piece(2) - expected).max() > 0.1 * scale


def test_the_limits_of_nemotron_h_are_not_those_of_transformers(tmp_path):
    """A fault of transformers 5.24: it ignores `time_step_limit`, and floors Δ at `time_step_min`.

    With the limits of its config.json, its computation is ours.
    """
    hf = built("Nemotron-H", time_step_limit=[0.6, 0.9], time_step_min=0.1)
    copy.deepcopy(hf).float().save_pretrained(tmp_path)
    theirs = logits_of(hf, TOKENS)
    for layer in hf.model.layers:
        if hasattr(layer.mixer, "A_log"):
            assert layer.mixer.time_step_limit == (0.1, np.inf)
            layer.mixer.time_step_limit = (0.6, 0.9)
    expected = logits_of(hf, TOKENS)
    with jax.enable_x64(True):
        config = load_pretrained(tmp_path).config
        ours, _ = from_weights(dict(hf.state_dict()), config, param_dtype="float64")(TOKENS)
    assert_close(ours, expected)
    assert np.abs(theirs - expected).max() > 0.05 * np.abs(expected).max()


def test_the_rotated_part_of_minimax_is_not_that_of_transformers(tmp_path, monkeypatch):
    """A fault of transformers 5.24: it ignores `rotary_dim`, and rotates whole heads of MiniMax.

    With the rotation of MiniMax-M2, in which this was repaired (48241), its computation is ours.
    """
    hf = built("MiniMax", head_dim=8, rotary_dim=4)
    copy.deepcopy(hf).float().save_pretrained(tmp_path)
    theirs = logits_of(hf, TOKENS)
    repaired = transformers.models.minimax_m2.modeling_minimax_m2.apply_rotary_pos_emb
    module = transformers.models.minimax.modeling_minimax
    monkeypatch.setattr(module, "apply_rotary_pos_emb", repaired)
    hf.model.rotary_emb.inv_freq = 1e6 ** -torch.tensor([0, 0.5], dtype=torch.float64)
    expected = logits_of(hf, TOKENS)
    with jax.enable_x64(True):
        config = load_pretrained(tmp_path).config
        ours, _ = from_weights(dict(hf.state_dict()), config, param_dtype="float64")(TOKENS)
    assert_close(ours, expected)
    assert np.abs(theirs - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("ours", architectures(HFConfig))
def test_defaults_are_those_of_transformers(ours):
    """A config.json of the sizes alone is read as the whole one that transformers writes."""
    for model_type in ours.model_types:
        if model_type not in transformers.CONFIG_MAPPING:
            continue  # published beside code of its own
        whole = transformers.AutoConfig.for_model(model_type).to_dict()
        if "text_config" in whole:
            continue  # its text part has a `model_type` of its own
        other = ours.hf_experts
        sizes = ours.hf_model(other is not None and model_type == other.model_type).sizes
        stated = {name: whole[name] for name in (*sizes, "model_type")}
        assert ours.from_hf(stated) == ours.from_hf(whole)


@pytest.mark.parametrize(
    ("name", "rescales"),
    [*((name, False) for name in DEFAULTS if name != "RecurrentGemma"), ("Mamba-2", True)],
)
def test_parameters_start_as_in_transformers(name, rescales):
    """With wider layers, and the standard deviation that transformers has by default.

    RecurrentGemma starts as in recurrentgemma, as `test_peers_griffin.py` shows.
    """
    kind, fields = MODELS[name]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 200, "num_heads": 32}
    sizes |= {"linear_num_key_heads": 32, "linear_num_value_heads": 64, "initializer_range": 0.02}
    sizes |= {"rescale_prenorm_residual": rescales, "mamba_num_heads": 32}
    sizes |= {"linear_num_heads": 32, "n_mamba_heads": 32}
    torch.manual_seed(0)
    original = getattr(transformers, kind)
    original = original(original.config_class(**fields | sizes, **EAGER))
    config = config_of(original.state_dict(), original.config.to_dict())
    assert_same_start(to_torch(config.build(rngs=nnx.Rngs(0)), "hf"), weights_of(original))


@pytest.mark.parametrize("hf", DEFAULTS, indirect=True)
def test_greedy_tokens_are_those_of_transformers(hf, folder):
    prompt = TOKENS[:, :9]
    theirs = copy.deepcopy(hf).float()
    theirs = theirs.generate(torch.as_tensor(prompt), do_sample=False, max_new_tokens=24)
    ours = generate(load_pretrained(folder), prompt, 24, key=jax.random.key(0), temperature=0)
    np.testing.assert_array_equal(ours, theirs[:, 9:])


def test_transformers_loads_what_is_exported(hf, folder, expected):
    """Strictly, and with the same weights and logits."""
    command.main(["--from", "hf", "--to", "back"])
    read, report = type(hf).from_pretrained("back", output_loading_info=True, **EAGER)
    computed = hf.state_dict().keys() - weights_of(hf)
    assert report.pop("missing_keys") == computed
    assert not any(report.values()), report
    assert config_of({}, read.config.to_dict()) == config_of({}, hf.config.to_dict())
    for key, array in weights_of(hf).items():
        assert torch.equal(read.state_dict()[key].double(), array), key
    assert_close(logits_of(read.double(), TOKENS), expected, 1e-5)


def test_a_multimodal_folder_is_read(tmp_path, monkeypatch):
    """Its text part equals that of transformers, and is exported as a text model."""
    monkeypatch.chdir(tmp_path)
    text = {**MODELS["Qwen3.5"][1], "tie_word_embeddings": True}
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=VISION, tie_word_embeddings=True, **EAGER
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained("hf")
    with pytest.warns(UserWarning, match=r"left out model\.visual\.\* \(\d+ weights\)$"):
        ours = load_pretrained("hf")
    expected = logits_of(model, TOKENS)
    assert_close(ours(TOKENS)[0], expected, 1e-4)
    with pytest.warns(UserWarning, match="left out"):
        command.main(["--from", "hf", "--to", "back"])
    for name in ("hf", "back"):
        read = transformers.Qwen3_5ForCausalLM.from_pretrained(name, **EAGER).eval()
        np.testing.assert_array_equal(logits_of(read, TOKENS), expected)
