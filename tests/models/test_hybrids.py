"""The hybrids read the config.json and the folders of transformers, or refuse them in one line."""

import json
import warnings
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import train.command.train as train_command
from jax_models import (
    BambaLanguageModelConfig,
    Experts,
    FalconH1LanguageModelConfig,
    GraniteLanguageModelConfig,
    JambaLanguageModelConfig,
    KimiLinearLanguageModelConfig,
    LaraMiniLanguageModelConfig,
    LFM2LanguageModelConfig,
    LFM3LanguageModelConfig,
    LingLanguageModelConfig,
    MiniMaxLanguageModelConfig,
    NemotronHLanguageModelConfig,
    OLMoHybridLanguageModelConfig,
    Qwen3NextLanguageModelConfig,
    Qwen35LanguageModelConfig,
    RMSNorm,
    ShortConvolution,
    Zamba2LanguageModelConfig,
    from_torch,
    load_pretrained,
    to_torch,
)
from jax_models.models.architecture import architectures
from jax_models.models.hybrid import (
    BalancedExpertsConfig,
    BlockKeys,
    ExpertsKeys,
    HybridBlock,
)
from jax_models.models.load import config_of
from jax_models.options import Index
from train.command import convert, generate
from train.command.export import export, logit_errors
from train.command.initial_weights import read_params
from train.run.config import TrainConfig
from train.run.folder import build_trainer
from twinscan.command_line import CommandLineError

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "intermediate_size": 20,
    "num_attention_heads": 4,
}
QWEN = SIZES | {"model_type": "qwen3_5_text"}
QWEN_MOE = SIZES | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 7}
QWEN_NEXT = SIZES | {"model_type": "qwen3_next"}
OLMO = SIZES | {"model_type": "olmo_hybrid"}
LFM2 = SIZES | {"model_type": "lfm2"}
LFM2_MOE = LFM2 | {"model_type": "lfm2_moe", "layer_types": ["conv", "conv", FULL] * 2}
LFM3 = SIZES | {"model_type": "lfm3"}
LARA = SIZES | {"model_type": "lara_mini"}
GRIFFIN = SIZES | {"model_type": "recurrent_gemma"}
MAMBA2 = SIZES | {"mamba_n_heads": 8, "num_key_value_heads": 2}
BAMBA = MAMBA2 | {"model_type": "bamba"}
GRANITE = MAMBA2 | {"model_type": "granitemoehybrid", "num_local_experts": 0}
GRANITE |= {"shared_intermediate_size": 7, "num_experts_per_tok": 0}
FALCON_H1 = MAMBA2 | {"model_type": "falcon_h1", "mamba_d_ssm": 24}
NEMOTRON_H = SIZES | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME"}
JAMBA = SIZES | {"model_type": "jamba", "mamba_dt_rank": 3}
ZAMBA2 = SIZES | {"model_type": "zamba2", "layers_block_type": ["mamba", "mamba", "hybrid"] * 2}
MINIMAX = SIZES | {"model_type": "minimax"}
MINIMAX_FILE = SIZES | {
    "model_type": "minimax_text_01",
    "attn_type_list": [0, 0, 1] * 2,
    "layernorm_full_attention_alpha": 2,
    "layernorm_full_attention_beta": 3,
    "layernorm_linear_attention_alpha": 4,
    "layernorm_linear_attention_beta": 5,
    "layernorm_mlp_alpha": 6,
    "layernorm_mlp_beta": 7,
    "postnorm": True,
    "rotary_dim": 2,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
}
"""The fields of the config.json that MiniMax published."""
KIMI = SIZES | {"model_type": "kimi_linear"}
KIMI_FILE = {"full_attn_layers": [3, 6], "kda_layers": [1, 2, 4, 5], "num_heads": 3}
LING = SIZES | {"model_type": "bailing_hybrid"}
XLSTM = {"model_type": "xlstm", "vocab_size": 11, "hidden_size": 48, "num_hidden_layers": 2}
XLSTM |= {"num_heads": 4}
XLSTM_FILE = {**XLSTM, "hidden_size": None, "num_hidden_layers": None, "embedding_dim": 48}
XLSTM_FILE |= {"num_blocks": 3, "weight_mode": "single"}
GRANITE_EXPERTS = GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}


def read(fields: dict[str, Any]) -> Any:
    """The config of a config.json."""
    return config_of({}, fields)


@pytest.mark.parametrize(
    "fields",
    [
        QWEN,
        QWEN_MOE,
        QWEN_NEXT | {"mlp_only_layers": [1]},
        OLMO,
        LFM2 | {"num_key_value_heads": 2},
        LFM2_MOE | {"num_key_value_heads": 2},
        LFM3 | {"num_key_value_heads": 2, "head_dim": 6, "use_sandwich_norm": False},
        LARA | {"sliding_window": 5, "shared_expert_intermediate_size": 3, "attention_bias": True},
        BAMBA,
        GRANITE,
        GRANITE_EXPERTS,
        FALCON_H1 | {"ssm_multipliers": [1, 2, 3, 4, 0.5], "mamba_rms_norm": True},
        NEMOTRON_H | {"moe_latent_size": 3, "time_step_limit": [0.5, 1.0], "n_group": 2},
        JAMBA | {"attn_layer_offset": 1, "expert_layer_period": 3, "num_key_value_heads": 2},
        ZAMBA2 | {"num_mem_blocks": 2, "adapter_rank": 3, "time_step_min": 0.1},
        MINIMAX | {"rotary_dim": 2, "head_dim": 6, "mlp_beta_factor": 0, "num_key_value_heads": 2},
        MINIMAX | {"rotary_dim": 30, "head_dim": 44},
        KIMI | {"linear_attn_config": KIMI_FILE, "q_lora_rank": 3, "num_shared_experts": 2},
        LING | {"head_dim": 5, "kda_safe_gate": False, "rope_theta": 3.0},
        XLSTM | {"hidden_size": 47, "qk_dim_factor": 0.52, "v_dim_factor": 1.03},
    ],
)
def test_a_config_that_is_written_is_read_again(fields):
    config = read(fields)
    assert read(json.loads(json.dumps(config.to_hf()))) == config
    names = {field.name for field in fields_of(config)}
    for change in (
        {"tied_head": not getattr(config, "tied_head", True)},
        {"head_features": 6, "rope_theta": 7.0},
    ):
        changed = replace(config, **{name: change[name] for name in names & change.keys()})
        assert read(json.loads(json.dumps(config.to_hf() | changed.to_hf()))) == changed


@pytest.mark.parametrize(
    "fields", [QWEN, QWEN_MOE, QWEN_NEXT, OLMO, LFM2, LFM3, LARA, BAMBA, GRANITE]
)
def test_the_size_of_a_head_that_no_field_states_is_written(fields):
    config = replace(read({"num_key_value_heads": 2, **fields}), head_features=None)
    assert read(config.to_hf()).head_size == config.head_size == 4


ROPE = "rope_parameters"


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        (QWEN | {"full_attention_interval": 2}, "block_types", (LINEAR, FULL)),
        (QWEN | {"layer_types": [LINEAR, LINEAR, FULL] * 2}, "block_types", (LINEAR, LINEAR, FULL)),
        (QWEN | {"rope_theta": 7.0}, "rope_theta", 7.0),
        (QWEN | {"rope_theta": 7.0, ROPE: {"rope_theta": 8.0}}, "rope_theta", 8.0),
        (QWEN | {"partial_rotary_factor": 0.5}, "rotary_fraction", 0.5),
        (QWEN | {ROPE: {"partial_rotary_factor": 0.5}}, "rotary_fraction", 0.5),
        (QWEN | {"tie_word_embeddings": True}, "tied_head", True),
        (QWEN_MOE | {"num_experts_per_tok": 3}, "experts_per_token", 3),
        (QWEN_NEXT | {"norm_topk_prob": False}, "normalize_experts", False),
        (QWEN_NEXT | {"decoder_sparse_step": 2}, "dense_layers", (0, 2, 4)),
        (QWEN_NEXT | {"mlp_only_layers": [3, 1, 9]}, "dense_layers", (1, 3)),
        (QWEN_NEXT | {"mlp_only_layers": None}, "dense_layers", ()),
        (OLMO | {ROPE: None}, "rope_theta", 1e4),
        (OLMO | {ROPE: {}}, "rope_theta", 1e4),
        (OLMO | {ROPE: {"rope_theta": None}}, "rope_theta", None),
        (OLMO | {"rope_theta": None}, "rope_theta", None),
        (OLMO | {"rope_theta": None, ROPE: {"rope_theta": 7.0}}, "rope_theta", 7.0),
        (OLMO | {"num_hidden_layers": 2}, "block_types", (LINEAR, FULL)),
        (OLMO | {"num_hidden_layers": 1}, "block_types", (FULL,)),
        (OLMO | {"full_attention_interval": 2}, "mixings", [LINEAR] * 3 + [FULL] + [LINEAR] * 2),
        (OLMO | {"linear_allow_neg_eigval": False}, "negative_eigenvalues", False),
        (LFM2 | {"full_attn_idxs": [2, 5]}, "block_types", ("conv", "conv", FULL)),
        (LFM2, "block_types", (FULL,)),
        (LFM2, "rope_theta", 1e6),
        (LFM2, "tied_head", True),
        (LFM2 | {"tie_embedding": False}, "tied_head", False),
        (LFM2 | {"tie_word_embeddings": False, "tie_embedding": True}, "tied_head", True),
        (LFM2 | {"norm_eps": 0.1}, "epsilon", 0.1),
        (LFM3, "mixings", ["conv", "conv", FULL, "conv", SLIDING, "conv"]),
        (LFM3, "rotary_fraction", 0.5),
        (LARA, "mixings", [LINEAR, SLIDING, LINEAR, FULL, SLIDING, LINEAR]),
        (LARA | {"norm_topk_prob": False}, "normalize_experts", False),
        (LFM3 | {"rms_norm_eps": 0.1}, "epsilon", 0.1),
        (LFM3 | {ROPE: {FULL: {"rope_theta": 7.0}}}, "rotary_fraction", 1.0),
        (LFM3 | {ROPE: {SLIDING: {"rope_type": "proportional"}}}, "sliding_rope_theta", 1e6),
        (BAMBA | {"attn_layer_indices": [1, 3, 5]}, "block_types", (LINEAR, FULL)),
        (BAMBA | {"attn_layer_indices": None}, "block_types", (LINEAR,)),
        (BAMBA | {"num_key_value_heads": None}, "num_kv_heads", 4),
        (BAMBA | {"partial_rotary_factor": 1.0}, "rotary_fraction", 0.5),
        (BAMBA | {ROPE: {"partial_rotary_factor": 1.0}}, "rotary_fraction", 1.0),
        (BAMBA | {"mamba_d_head": "auto"}, "mamba_head_features", 4),
        (BAMBA | {"mamba_d_head": 2, "mamba_expand": 1}, "mamba_head_features", 2),
        (BAMBA | {"time_step_limit": [0.1, float("inf")]}, "dt_limits", (0.1, float("inf"))),
        (
            GRANITE | {"layers_block_type": ["mamba", "attention"] * 3},
            "block_types",
            (LINEAR, FULL),
        ),
        (GRANITE | {"layer_types": [LINEAR, FULL] * 3}, "block_types", (LINEAR, FULL)),
        (GRANITE | {"rope_theta": 7.0}, "rope_theta", None),
        (GRANITE | {"rope_theta": 7.0, "position_embedding_type": "nope"}, "rope_theta", None),
        (GRANITE | {"rope_theta": 7.0, "position_embedding_type": "rope"}, "rope_theta", 7.0),
        (GRANITE | {"position_embedding_type": "rope"}, "rope_theta", 10_000.0),
        (GRANITE | {"residual_multiplier": 0.22}, "residual_multiplier", 0.22),
        (GRANITE | {"logits_scaling": 6}, "logits_scaling", 6.0),
        (GRANITE | {"num_local_experts": None}, "num_experts", 0),
        (FALCON_H1, "mixings", ["hybrid"] * 6),
        (FALCON_H1, "mamba_head_features", 3),
        (FALCON_H1 | {"mamba_d_ssm": None}, "mamba_head_features", 4),
        (
            {name: value for name, value in FALCON_H1.items() if name != "mamba_d_ssm"},
            "mamba_head_features",
            128,
        ),
        (FALCON_H1 | {"mamba_d_state": None}, "state_features", 256),
        (FALCON_H1 | {"ssm_multipliers": None}, "mamba_multipliers", (1.0,) * 5),
        (FALCON_H1 | {"mlp_multipliers": [0.5, 2]}, "mlp_multipliers", (0.5, 2.0)),
        (FALCON_H1 | {"lm_head_multiplier": 0.5}, "head_multiplier", 0.5),
        (FALCON_H1 | {"projectors_bias": True}, "mamba_out_bias", True),
        (NEMOTRON_H | {"num_hidden_layers": 9}, "num_layers", 6),
        (
            NEMOTRON_H | {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"]},
            "block_types",
            (LINEAR, "moe"),
        ),
        (NEMOTRON_H | {"layer_types": ["attention"] * 6}, "block_types", (FULL,)),
        (NEMOTRON_H | {"mamba_n_groups": 4}, "num_groups", 4),
        (NEMOTRON_H | {"mamba_dt_limit": [0.5, 1.0]}, "dt_limits", (0.5, 1.0)),
        (JAMBA, "mixings", [LINEAR] * 4 + [FULL, LINEAR]),
        (JAMBA | {"attn_layer_offset": 7}, "block_types", (LINEAR,)),
        (JAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1}, "block_types", (LINEAR, FULL)),
        (JAMBA | {"mamba_dt_rank": "auto"}, "dt_rank", 1),
        (JAMBA | {"mamba_expand": 3}, "inner_features", 48),
        (JAMBA | {"num_key_value_heads": None}, "num_kv_heads", 4),
        (JAMBA | {"num_experts": 1}, "num_experts", 1),
        (JAMBA | {"expert_layer_offset": 0}, "experts_offset", 0),
        (ZAMBA2, "block_types", (LINEAR, LINEAR, "hybrid")),
        (ZAMBA2, "rope_theta", None),
        (ZAMBA2 | {"use_mem_rope": True}, "rope_theta", 10_000.0),
        (ZAMBA2 | {"use_mem_rope": True, "rope_theta": 7}, "rope_theta", 7.0),
        (ZAMBA2 | {"intermediate_size": None}, "mlp_features", 64),
        (ZAMBA2 | {"num_key_value_heads": None}, "num_kv_heads", 4),
        (ZAMBA2 | {"time_step_min": 0.5}, "dt_limits", (0.5, float("inf"))),
        (MINIMAX, "mixings", [FULL, LINEAR] * 3),
        (MINIMAX | {"num_key_value_heads": None}, "num_kv_heads", 4),
        (MINIMAX | {"rotary_dim": 2}, "rotary_fraction", 0.5),
        (MINIMAX | {"rotary_dim": 2, "head_dim": 8}, "rotary_fraction", 0.25),
        (MINIMAX | {"rotary_dim": 30, "head_dim": 44}, "rotary_features", 30),
        (MINIMAX, "expert_features", 20),
        (MINIMAX | {"num_experts": 5}, "num_experts", 5),
        (MINIMAX_FILE, "block_types", (LINEAR, LINEAR, FULL)),
        (MINIMAX_FILE, "full_alpha", 2.0),
        (MINIMAX_FILE, "full_beta", 3.0),
        (MINIMAX_FILE, "lightning_alpha", 4.0),
        (MINIMAX_FILE, "lightning_beta", 5.0),
        (MINIMAX_FILE, "mlp_alpha", 6.0),
        (MINIMAX_FILE, "mlp_beta", 7.0),
        (MINIMAX | {"mlp_alpha_factor": -1.5}, "mlp_alpha", -1.5),
        (MINIMAX | {ROPE: {"partial_rotary_factor": 0.5}}, "rotary_fraction", 0.5),
        (KIMI, "mixings", [LINEAR] * 4 + [FULL, LINEAR]),
        (KIMI | {"linear_attn_config": KIMI_FILE}, "block_types", (LINEAR, LINEAR, FULL)),
        (KIMI | {"linear_attn_config": KIMI_FILE}, "delta_heads", 3),
        (KIMI | {"linear_attn_config": {"head_dim": 5}}, "delta_head_features", 5),
        (KIMI | {"linear_attn_config": {"short_conv_kernel_size": 3}}, "kernel_size", 3),
        (KIMI | {"first_k_dense_replace": 3}, "num_dense_layers", 3),
        (KIMI | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}, "num_dense_layers", 2),
        (KIMI | {"n_group": 4}, "num_expert_groups", 4),
        (KIMI | {"num_local_experts": 9}, "num_experts", 9),
        (LING, "mixings", [LINEAR] * 5 + [FULL]),
        (LING | {"layer_group_size": 2}, "block_types", (LINEAR, FULL)),
        (LING | {"head_dim": 5}, "delta_head_features", 5),
        (LING | {"head_dim": 5, "linear_head_dim": 6}, "delta_head_features", 6),
        (LING | {"kda_lower_bound": -3}, "min_log_decay", -3.0),
        (LING | {"kda_safe_gate": False}, "min_log_decay", None),
        (LING | {"rope_theta": 7.0}, "rope_theta", 7.0),
        (LING, "num_dense_layers", 2),
        (XLSTM, "key_features", 6),
        (XLSTM, "value_features", 12),
        (XLSTM, "mlp_features", 128),
        (XLSTM | {"ffn_round_up_to_multiple_of": 3}, "mlp_features", 129),
        (XLSTM_FILE, "features", 48),
        (XLSTM_FILE, "num_layers", 3),
        (GRANITE_EXPERTS, "num_experts", 6),
        (GRANITE_EXPERTS, "experts_per_token", 3),
        (GRANITE_EXPERTS, "expert_features", 20),
        (GRANITE_EXPERTS, "mlp_features", 7),
        (GRANITE_EXPERTS | {"num_experts_per_tok": None}, "experts_per_token", 2),
        (
            {name: value for name, value in GRANITE_EXPERTS.items() if "local" not in name},
            "num_experts",
            8,
        ),
        (LFM2 | {"block_auto_adjust_ff_dim": False}, "mlp_features", 20),
        (LFM2 | {"block_auto_adjust_ff_dim": False, "block_ff_dim": 9}, "mlp_features", 9),
        (LFM2 | {"block_ffn_dim_multiplier": None}, "mlp_features", 13),
        (LFM2 | {"block_multiple_of": 4}, "mlp_features", 16),
        (
            LFM2 | {"block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
            "mlp_features",
            5768,
        ),
        (LFM2_MOE, "num_dense_layers", 2),
        (LFM2_MOE, "mlp_features", 20),
        (LFM2_MOE | {"num_dense_layers": 0}, "num_dense_layers", 0),
        (LFM2_MOE | {"use_expert_bias": False}, "use_expert_bias", False),
        (LFM2_MOE | {"norm_topk_prob": False}, "normalize_experts", False),
        (LFM2_MOE | {"routed_scaling_factor": 2}, "experts_scale", 2.0),
        (LFM2_MOE | {"tie_embedding": False}, "tied_head", False),
    ],
)
def test_a_field_of_a_config_json_is_read(fields, field, value):
    """`test_peers_hybrids.py` reads the fields and the defaults of transformers' own folders."""
    latent = fields["model_type"] in ("kimi_linear", "bailing_hybrid")
    kv_heads = {} if latent else {"num_key_value_heads": 2}
    assert getattr(read(kv_heads | fields), field) == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (QWEN | {"layer_types": [LINEAR] * 5}, "layer_types: expected num_hidden_layers=6"),
        (QWEN | {"layer_types": [LINEAR, "mamba"] * 3}, "layer_types: expected some of .*mamba"),
        (LFM2 | {"layer_types": [LINEAR] * 6}, "layer_types: expected some of .*conv"),
        (QWEN | {"full_attention_interval": 0}, "full_attention_interval: expected a positive"),
        (QWEN | {ROPE: {"rope_type": "yarn"}}, "rope_type: expected default, got yarn"),
        (LFM2 | {"rope_scaling": {"type": "linear"}}, "rope_type: expected default, got linear"),
        (OLMO | {ROPE: {FULL: {"rope_theta": 3.0}}}, "rope_parameters: expected one set"),
        (LFM3 | {ROPE: {"rope_theta": 3.0}}, "rope_parameters: expected those of full_attention "),
        (LFM3 | {ROPE: {FULL: {"rope_type": "yarn"}}}, "full_attention.rope_type: .* got yarn"),
        (LFM3 | {"sliding_window": None, "num_key_value_heads": 2}, "sliding_window: .*got None"),
        (QWEN | {"hidden_act": "gelu"}, "hidden_act: expected silu, got gelu"),
        (OLMO | {"attention_dropout": 0.1}, "attention_dropout: expected 0, got 0.1"),
        (
            QWEN | {"num_experts": 8},
            "num_experts: expected none, .* experts .* in qwen3_5_text, got 8",
        ),
        (LFM2 | {"num_experts": 8}, "num_experts: expected none, .*in lfm2, got 8"),
        (
            LFM2_MOE | {"num_experts": 3, "num_key_value_heads": 2},
            "experts_per_token: expected at .* 3, got 4",
        ),
        (GRANITE | {"num_experts": 8}, "num_experts: expected none, .*Granite 4, got 8"),
        (BAMBA | {"num_local_experts": 8}, "num_local_experts: expected none, .*Bamba, got 8"),
        (
            GRANITE_EXPERTS | {"num_experts_per_tok": 7},
            "experts_per_token: expected at .* 6, got 7",
        ),
        (LFM2 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*got fp8"),
        (
            QWEN_MOE | {"shared_expert_intermediate_size": None},
            "shared_expert_intermediate_size: expected an integer, got None",
        ),
        (QWEN_NEXT | {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive"),
        (QWEN | {"model_type": "qwen3_5_moe"}, "text_config: expected an object, got None"),
        (QWEN | {"model_type": "qwen3_5"}, "text_config: expected an object, got None"),
        (QWEN | {"hidden_size": None}, "hidden_size: expected an integer, got None"),
        (OLMO | {"linear_num_key_heads": 3}, "num_key_heads"),
        (GRIFFIN | {"intermediate_size": "20"}, "intermediate_size: expected an integer, got '20'"),
        (GRIFFIN | {"hidden_activation": "silu"}, "hidden_activation: expected gelu_.*, got silu"),
        (GRIFFIN | {"tie_word_embeddings": False}, "tie_word_embeddings: expected True, got False"),
        (GRIFFIN | {ROPE: {"rope_type": "yarn"}}, "rope_type: expected default, got yarn"),
        (GRIFFIN | {"block_types": ["mamba"]}, "block_types: expected some of .*mamba"),
        (BAMBA | {"mamba_d_head": 3}, r"mamba_d_head: expected .* = 32 / 8, got 3"),
        (
            ZAMBA2 | {"n_mamba_heads": 3},
            "heads of a Mamba-2: expected a divisor of its width=32",
        ),
        (FALCON_H1 | {"mamba_d_head": 4}, r"mamba_d_head: expected .* = 24 / 8, got 4"),
        (FALCON_H1 | {"ssm_multipliers": [1, 2]}, "mamba_multipliers: expected 5 numbers, got 2"),
        (NEMOTRON_H | {"hybrid_override_pattern": "MX"}, "layer_types: expected some of .*X"),
        (NEMOTRON_H | {"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected relu2, got silu"),
        (JAMBA | {"attn_layer_offset": 8}, "attn_layer_offset: expected .* 8, got 8"),
        (JAMBA | {"expert_layer_offset": 2}, "experts_offset: expected .* = 2, got 2"),
        (ZAMBA2 | {"use_long_context": True}, "use_long_context: expected False, got True"),
        (ZAMBA2 | {"layers_block_type": None}, "layer_types: expected num_hidden_layers=6 .* 54"),
        (
            ZAMBA2 | {"use_shared_attention_adapter": True, "num_key_value_heads": 2},
            "num_kv_heads: expected num_heads = 4 with attention_adapters, .* got 2",
        ),
        (MINIMAX | {"sliding_window": 5}, "sliding_window: expected None, got 5"),
        (MINIMAX_FILE | {"attn_type_list": [0, 2] * 3}, "layer_types: expected some of .*2"),
        (MINIMAX_FILE | {"postnorm": False}, "postnorm: expected True, got False"),
        (MINIMAX_FILE | {"shared_intermediate_size": 3}, "shared_intermediate_size: .* 0, got 3"),
        (MINIMAX | {"num_local_experts": 0}, "num_experts: expected .*, got 0"),
        (MINIMAX | {"rotary_dim": 3}, "rotary_dim: expected an even number .*, got 3"),
        (MINIMAX | {"rotary_dim": 6}, "rotary_dim: expected .* 4 features, got 6"),
        (KIMI | {"num_key_value_heads": 2}, "num_key_value_heads: expected .*=4, got 2"),
        (KIMI | {"mlp_layer_types": ["sparse", "dense"] * 3}, "mlp_layer_types: expected .* first"),
        (
            KIMI | {"linear_attn_config": KIMI_FILE | {"kda_layers": [1, 5]}},
            r"linear_attn_config: expected each of 1 … 6 once in .*, missing \[2, 4\]",
        ),
        (
            KIMI | {"linear_attn_config": KIMI_FILE | {"full_attn_layers": [2, 3, 6]}},
            r"linear_attn_config: expected each of .*, missing \[\], more than once \[2\]",
        ),
        (KIMI | {"mla_use_nope": False}, "mla_use_nope: expected True, got False"),
        (XLSTM | {"use_bias": True}, "use_bias: expected False, got True"),
        (XLSTM | {"add_out_norm": False}, "add_out_norm: expected True, got False"),
        (XLSTM | {"v_dim_factor": 1.05}, "v_dim_factor: expected .* num_heads = 4 .*, got 50"),
        (BAMBA | {"hidden_act": "relu"}, "hidden_act: expected silu or swish, got relu"),
        (
            GRANITE | {"position_embedding_type": "alibi"},
            "position_embedding_type: expected .*rope",
        ),
    ],
)
def test_a_config_json_that_is_not_supported_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        read(fields).build(rngs=nnx.Rngs(0))
    assert "\n" not in str(error.value)


def test_the_config_json_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"^config: model_type: expected olmo_hybrid, got bamba$"):
        OLMoHybridLanguageModelConfig.from_hf(BAMBA)


def folder_of(config: Any, folder: Any, layout: str, others: Any = (), **fields: Any) -> Any:
    """Writes a folder with random weights, and with zeros under other keys."""
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    drawn = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), nnx.state(model))
    nnx.update(model, drawn)
    weights = to_torch(model, layout)
    save_file(
        weights | {key: np.zeros(3, np.float32) for key in others}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config.to_hf() | fields))
    return weights


small = {"vocab_size": 11, "features": 8, "num_layers": 2, "mlp_features": 7, "num_heads": 2}
mamba2 = {"block_types": (LINEAR, FULL), "mamba_heads": 4, "mamba_head_features": 4}
granite = GraniteLanguageModelConfig(
    **small, **mamba2, embedding_multiplier=12.0, attention_multiplier=0.1, rope_theta=7.0
)
zamba2 = Zamba2LanguageModelConfig(
    **small | {"num_layers": 3},
    block_types=("hybrid", LINEAR),
    num_kv_heads=2,
    mamba_heads=4,
    mamba_head_features=4,
    adapter_rank=3,
    attention_adapters=True,
    rope_theta=7.0,
)
qwen = Qwen35LanguageModelConfig(
    **small, block_types=(LINEAR, FULL), head_features=4, key_features=3, value_features=5
)
qwen3_next = Qwen3NextLanguageModelConfig(
    **small,
    head_features=4,
    num_experts=4,
    expert_features=5,
    shared_features=3,
    block_types=(LINEAR, FULL),
    num_key_heads=2,
    key_features=3,
    value_features=5,
)
jamba = JambaLanguageModelConfig(
    **small, block_types=(LINEAR, FULL), inner_features=16, state_features=3, dt_rank=2
)
latent = {"latent_features": 5, "key_features": 4, "shared_features": 2, "value_features": 3}
kimi = KimiLinearLanguageModelConfig(
    **small,
    **latent,
    block_types=(LINEAR, FULL),
    delta_heads=3,
    delta_head_features=4,
    num_experts=4,
    expert_features=5,
    num_shared_experts=2,
)
ling = LingLanguageModelConfig(**vars(kimi) | {"rope_theta": 7.0, "min_log_decay": -3.0})
NEVER_TIED = ("nemotron_h", "kimi_linear", "kimi_linear with experts only", "bailing_hybrid")
"""The models whose head is never tied."""
MODELS = {
    "bailing_hybrid": ling,
    "kimi_linear": kimi,
    "kimi_linear with experts only": replace(kimi, num_dense_layers=0, query_features=6),
    "qwen3_5_text": qwen,
    "qwen3_5_text with experts": replace(
        qwen, num_experts=4, experts_per_token=3, expert_features=5
    ),
    "qwen3_next": qwen3_next,
    "qwen3_next with an MLP": replace(qwen3_next, dense_layers=(1,)),
    "olmo_hybrid": OLMoHybridLanguageModelConfig(
        **small, block_types=(LINEAR, FULL), key_features=3, value_features=5, num_key_heads=2
    ),
    "lfm2": LFM2LanguageModelConfig(**small, block_types=("conv", FULL)),
    "lfm2 with experts": LFM2LanguageModelConfig(
        **small,
        block_types=("conv", FULL),
        num_experts=4,
        experts_per_token=3,
        expert_features=5,
        num_dense_layers=1,
        use_expert_bias=True,
    ),
    "lfm3": LFM3LanguageModelConfig(
        **small, block_types=(SLIDING, FULL), head_features=4, window=5, sliding_rope_theta=7.0
    ),
    "lara_mini": LaraMiniLanguageModelConfig(
        vocab_size=11,
        features=8,
        num_layers=2,
        num_heads=2,
        block_types=(LINEAR, SLIDING),
        window=5,
        head_features=4,
        num_key_heads=2,
        key_features=3,
        value_features=5,
        num_experts=4,
        expert_features=5,
        shared_features=3,
    ),
    "bamba": BambaLanguageModelConfig(**small, **mamba2, mlp_bias=True),
    "falcon_h1": FalconH1LanguageModelConfig(
        **small,
        mamba_heads=4,
        mamba_head_features=5,
        mamba_norm=True,
        mamba_multipliers=(0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "nemotron_h": NemotronHLanguageModelConfig(
        **small | {"num_layers": 4},
        mamba_heads=4,
        mamba_head_features=5,
        num_experts=4,
        expert_features=5,
        shared_features=6,
        latent_features=3,
    ),
    "zamba2": zamba2,
    "jamba": jamba,
    "jamba with experts": replace(jamba, num_experts=4),
    "minimax": MiniMaxLanguageModelConfig(
        vocab_size=11,
        features=8,
        num_layers=2,
        num_heads=2,
        block_types=(LINEAR, FULL),
        num_experts=4,
        expert_features=7,
    ),
    "granitemoehybrid": granite,
    "granitemoehybrid with experts": replace(
        granite, num_experts=4, experts_per_token=3, expert_features=5
    ),
}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bamba", {"mamba_heads": 3}, "mamba_heads: expected .* multiple of features = 8, .* 12$"),
        ("zamba2", {"dt_limits": (0.1, 0.5)}, "dt_limits: expected no upper limit, .* got 0.5$"),
        ("jamba", {"inner_features": 12}, "inner_features: expected a multiple of .* = 8, .* 12$"),
        (
            "jamba",
            {"num_layers": 4, "block_types": (FULL, FULL, LINEAR)},
            "block_types: expected attention in one block of each period, ",
        ),
    ],
)
def test_a_config_that_transformers_cannot_have_is_not_written(name, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(MODELS[name], **change).to_hf()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        (name, tied)
        for name in MODELS
        for tied in (True, False)
        if not tied or name not in NEVER_TIED
    ],
)
def test_a_folder_in_any_layout_is_read(name, tied, tmp_path):
    config = replace(MODELS[name], **{} if name in NEVER_TIED else {"tied_head": tied})
    for layout in config.layouts:
        weights = folder_of(config, tmp_path, layout)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = load_pretrained(tmp_path)
        assert model.config == config
        for key, array in to_torch(model, layout).items():
            assert array.tobytes() == weights[key].tobytes(), key


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_text with experts")],
)
def test_the_text_part_of_a_multimodal_folder_is_read_and_fine_tuned(model_type, name, tmp_path):
    config = MODELS[name]
    others = ["mtp.fc.weight", "mtp.norm.weight", "model.visual.pos_embed.weight"]
    fields = {"model_type": model_type, "text_config": config.to_hf(), "tie_word_embeddings": True}
    write = partial(folder_of, config, tmp_path, "multimodal-file", **fields)
    weights = write(others)
    options = TrainConfig(model=config, batch_size=2, window=8)
    trainer = build_trainer(options)
    listed = r"left out mtp\.\* \(2 weights\), model\.visual\.\* \(1 weights\)$"
    with pytest.warns(UserWarning, match=listed):
        read = load_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=listed) as warned:
        params = read_params(trainer, options, tmp_path)
    assert len(warned) == 1
    assert read.config == config
    for model in (read, trainer.model(params)):
        for key, array in to_torch(model, "multimodal-file").items():
            assert array.tobytes() == weights[key].tobytes(), key
    write(["vision.x"])
    with pytest.raises(ValueError, match=r"(?s)does not fit .*unexpected key vision\.x"):
        load_pretrained(tmp_path)


def test_shared_weights_are_written_once_unless_the_head_is_not_tied():
    """Transformers 5.24 shares the transformers of Zamba2 only if the head is tied."""
    for tied in (True, False):
        model = replace(MODELS["zamba2"], tied_head=tied).build(rngs=nnx.Rngs(0))
        params = sum(a.size for a in jax.tree.leaves(nnx.state(model)))
        written = {layout: to_torch(model, layout) for layout in model.config.layouts}
        sizes = {layout: sum(a.size for a in arrays.values()) for layout, arrays in written.items()}
        assert (sizes["hf-file"] == params) is tied
        assert (sizes["hf-file"] == sizes["hf"]) is not tied
        for arrays in written.values():
            assert to_torch(from_torch(model, arrays), "hf").keys() == written["hf"].keys()


def test_nemotron_h_leaves_out_the_weights_that_predict_several_tokens(tmp_path):
    config = MODELS["nemotron_h"]
    for layout in config.layouts:
        folder_of(config, tmp_path, layout, ["mtp.layers.0.mixer.q_proj.weight"])
        with pytest.warns(UserWarning, match=r"left out mtp\.\* \(1 weights\)$"):
            assert load_pretrained(tmp_path).config == config


def test_ling_leaves_out_the_block_that_predicts_a_second_token(tmp_path):
    config = MODELS["bailing_hybrid"]
    folder_of(config, tmp_path, "hf-file", ["model.layers.2.eh_proj.weight"])
    with pytest.warns(UserWarning, match=r"left out model\.layers\.2\.\* \(1 weights\)$"):
        assert load_pretrained(tmp_path).config == config


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_is_compared_with_its_twin(name, tmp_path):
    """The text may be longer than the states of the config."""
    model = replace(MODELS[name], max_length=40).build(rngs=nnx.Rngs(0))
    export(model, tmp_path / "twin.safetensors")
    assert 0 < max(logit_errors(model, tmp_path / "twin.safetensors")) < 1e-5


def test_folders_without_the_model_are_refused(tmp_path):
    config = MODELS["qwen3_5_text"]
    folder_of(config, tmp_path, "hf-file")
    fields = config.to_hf() | {"layer_types": [FULL, LINEAR]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="does not fit"):
        load_pretrained(tmp_path)
    save_file({"model.visual.x": np.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    with pytest.raises(ValueError, match=r"expected a Qwen3.5, got only model.visual.\* \(1"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "wide"),
    [
        ("qwen3_5_text", (".linear_attn.A_log", ".linear_attn.norm.weight")),
        ("granitemoehybrid", (".mamba.A_log", ".mamba.D", ".mamba.dt_bias")),
        ("kimi_linear", (".self_attn.A_log", ".self_attn.dt_bias", ".gate.weight")),
    ],
)
def test_decays_in_float32_leave_the_other_weights_in_bfloat16(name, wide, tmp_path, monkeypatch):
    """The published files of Qwen3.5 have two dtypes. All bits stay, and no memory is wasted."""
    monkeypatch.chdir(tmp_path)
    weights = folder_of(MODELS[name], tmp_path, "hf-file")
    weights = {k: w if k.endswith(wide) else w.astype(jnp.bfloat16) for k, w in weights.items()}
    save_file(weights, "model.safetensors")
    model = load_pretrained(".")
    logits, _ = jax.eval_shape(nnx.view(model, max_length=9), np.arange(9)[None])
    assert logits.dtype == jnp.bfloat16
    convert.main(["--from", ".", "--to", "back"])
    for written in (to_torch(model, "hf-file"), load_file("back/model.safetensors")):
        assert written.keys() == weights.keys()
        for key, array in weights.items():
            assert (written[key].dtype, written[key].tobytes()) == (array.dtype, array.tobytes())
    narrow = load_pretrained(".", param_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(narrow))} == {jnp.dtype("bfloat16")}


def test_a_block_with_a_gated_shared_expert_and_a_bias_is_read():
    """The keys are those of a mixture of Qwen3-Next, with the bias of LFM2-MoE."""
    gate, up, down = (f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
    shared, shared_gate = "mlp.shared_expert", "mlp.shared_expert_gate"
    experts = ExpertsKeys("mlp.gate.weight", gate, up, down, "mlp.expert_bias", shared, shared_gate)
    keys = BlockKeys("conv", "norm", "mlp_norm", "lfm2", experts=experts)

    def block(seed: int) -> HybridBlock:
        rngs = nnx.Rngs(seed)
        options: dict[str, Any] = {"shared_features": 3, "shared_gate": True}
        mlp = partial(Experts, 8, 5, 2, 1, use_expert_bias=True, **options)
        return HybridBlock(
            ShortConvolution(8, rngs=rngs), mlp, RMSNorm, keys={"qwen": keys}, rngs=rngs
        )

    weights = to_torch(block(0), "qwen")
    projections = [key.format(i) for i in range(2) for key in (gate, up, down)]
    projections += [f"{shared}.{name}_proj.weight" for name in ("gate", "up", "down")]
    others = ["mlp.gate.weight", "mlp.expert_bias", f"{shared_gate}.weight"]
    assert {key for key in weights if key.startswith("mlp.")} == {*projections, *others}
    loaded = to_torch(from_torch(block(1), weights, "qwen"), "qwen")
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)


def quantized(dtype: str, *scales: str):
    """Changes a weight of a folder to another dtype, and adds others beside it."""

    def change(folder: Any) -> None:
        weights = load_file(folder / "model.safetensors")
        key = next(key for key in weights if key.endswith("q_proj.weight"))
        weights[key] = weights[key].astype(np.dtype(dtype))
        others = {f"{key}{scale}": np.ones(1, np.float32) for scale in scales}
        save_file(weights | others, folder / "model.safetensors")

    return change


BAD_FOLDERS = [
    (
        {"model_type": "a_moe", "architectures": ["AMoe"]},
        None,
        r"got a_moe \(AMoe\), a mixture of experts$",
    ),
    ({"model_type": "qwen3_5_vision", "architectures": None}, None, "got qwen3_5_vision$"),
    ({"num_experts": 8}, None, "num_experts: expected none"),
    ({"hidden_size": 16}, None, "embed_tokens.weight: expected shape"),
    ({}, quantized("int8", "_scale"), "floating numbers, got int8; .*key .*weight_scale(;|$)"),
    ({}, quantized("float8_e4m3fn"), "8-bit floats are not supported"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "change", "message"), BAD_FOLDERS)
def test_every_command_refuses_a_folder_in_one_line(fields, change, message, tmp_path):
    folder, text, out = tmp_path / "hf", tmp_path / "text", str(tmp_path / "out")
    folder.mkdir()
    text.write_text("a few words " * 100)
    folder_of(MODELS["lfm2"], folder, "hf-file", **fields)
    if change is not None:
        change(folder)
    given = str(folder)
    for main, args in (
        (generate.main, ["--weights", given, "--prompt-tokens", "1"]),
        (convert.main, ["--from", given, "--to", out]),
        (train_command.main, ["--init", given, "--text", str(text), "--out", out]),
    ):
        with pytest.raises(CommandLineError, match=message) as error:
            main(args)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_three_convolutions_in_any_division_are_read(tmp_path):
    """Transformers writes equal thirds; files may also be divided by q, k and v."""
    config = replace(MODELS["olmo_hybrid"], num_value_heads=4)
    thirds = folder_of(config, tmp_path, "hf-file")
    keys = [f"model.layers.0.linear_attn.{name}_conv1d.weight" for name in "qkv"]
    whole = np.concatenate([thirds[key] for key in keys])
    assert [len(thirds[key]) for key in keys] == [11, 11, 10]
    by_size = dict(zip(keys, np.split(whole, [6, 12]), strict=True))
    for parts in ({}, by_size):
        save_file(thirds | parts, tmp_path / "model.safetensors")
        model = load_pretrained(tmp_path)
        got = to_torch(model, "hf")["model.layers.0.linear_attn.conv1d.weight"]
        np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize(
    "config",
    [
        config
        for config in architectures()
        if issubclass(config, BalancedExpertsConfig)
        if config.field_types()["num_experts"] is Index  # MiniMax always has experts
    ],
)
def test_a_model_without_experts_does_not_balance_them(config):
    unused = "^balance_experts: expected False in a model without experts, got True$"
    with pytest.raises(ValueError, match=unused):
        config(num_experts=0, balance_experts=True)
    with pytest.raises(ValueError, match=r"^balance_coefficient: expected at least 0, got -1"):
        config(balance_coefficient=-1.0)
    # A config.json may have the option nevertheless.
    fields = config(num_experts=0).to_hf() | {"output_router_logits": True}
    assert not config.from_hf(fields).balance_experts
