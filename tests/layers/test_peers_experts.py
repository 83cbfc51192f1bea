"""Compares mixtures of experts, and their twin, with those of transformers."""

from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jax_models import Experts, GatedMLP, from_torch, to_torch
from jax_models.weights import Table, linear, nested
from parity_tests import assert_parity
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

EAGER = {"experts_implementation": "eager", "hidden_size": 12}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 7}
NEMOTRON = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "moe_shared_expert_intermediate_size": 5,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
STACKED = ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")
BIASED = {"scores": "sigmoid", "use_expert_bias": True}
GROUPS = {"num_groups": 4, "groups_per_token": 2, "activation": "relu2", "gated": False}


def granite_rows(experts: Experts) -> Table:
    return experts.rows("router.weight", *STACKED)


def qwen_rows(experts: Experts) -> Table:
    assert isinstance(experts.shared, GatedMLP)
    shared = experts.shared.rows("gate_proj", "up_proj", "down_proj")
    return [
        *experts.rows("gate.weight", *STACKED),
        *nested(shared, "shared", "shared_expert"),
        *linear("shared_gate", "shared_expert_gate", bias=False),
    ]


def jamba_rows(experts: Experts) -> Table:
    return experts.rows("router.weight", *STACKED)


def lfm2_rows(experts: Experts) -> Table:
    has_bias = experts.expert_bias is not None
    return experts.rows("gate.weight", *STACKED, "expert_bias" if has_bias else None)


def nemotron_rows(experts: Experts) -> Table:
    up, down = "experts.up_proj", "experts.down_proj"
    assert experts.shared is not None
    return [
        *experts.rows("gate.weight", None, up, down, "gate.e_score_correction_bias"),
        *nested(experts.shared.rows("up_proj", "down_proj"), "shared", "shared_experts"),
    ]


PEERS: list[tuple[str, str, dict[str, Any], Any, tuple[int, ...], dict[str, Any]]] = [
    (
        "GraniteMoeHybrid",
        "MoE",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 7,
            "mamba_n_heads": 8,
        },
        granite_rows,
        (7, 6, 2),
        {},
    ),
    (
        "Qwen3Next",
        "SparseMoeBlock",
        {**ROUTED, "shared_expert_intermediate_size": 5, "norm_topk_prob": True},
        qwen_rows,
        (7, 6, 3),
        {"shared_features": 5, "shared_gate": True},
    ),
    (
        "Qwen3Next",
        "SparseMoeBlock",
        {**ROUTED, "shared_expert_intermediate_size": 5, "norm_topk_prob": False},
        qwen_rows,
        (7, 6, 3),
        {"shared_features": 5, "shared_gate": True, "normalize": False},
    ),
    (
        "Jamba",
        "SparseMoeBlock",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 7},
        jamba_rows,
        (7, 6, 2),
        {"normalize": False},
    ),
    (
        "Lfm2Moe",
        "SparseMoeBlock",
        {**ROUTED, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        lfm2_rows,
        (7, 6, 3),
        {**BIASED, "epsilon": 1e-6, "scale": 1.5},
    ),
    (
        "Lfm2Moe",
        "SparseMoeBlock",
        {**ROUTED, "use_expert_bias": False, "norm_topk_prob": False},
        lfm2_rows,
        (7, 6, 3),
        {"scores": "sigmoid", "normalize": False},
    ),
    (
        "NemotronH",
        "MoE",
        NEMOTRON,
        nemotron_rows,
        (7, 12, 3),
        {**BIASED, **GROUPS, "scale": 2.5, "shared_features": 5},
    ),
    (
        "NemotronH",
        "MoE",
        {**NEMOTRON, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        nemotron_rows,
        (7, 12, 3),
        {**BIASED, **GROUPS, "num_groups": 1, "groups_per_token": 1, "normalize": False}
        | {"scale": 2.5, "shared_features": 5},
    ),
]
"""The family and the class of the peer, its config, its keys, and sizes and options of ours."""


@pytest.mark.parametrize(("family", "kind", "config", "rows", "sizes", "options"), PEERS)
def test_experts_are_those_of_transformers(family, kind, config, rows, sizes, options):
    """So are those of the twin, because two sides by the same people could share a misreading."""
    transformers = pytest.importorskip("transformers")
    folder = {"GraniteMoeHybrid": "granitemoehybrid", "Qwen3Next": "qwen3_next"}
    folder |= {"Lfm2Moe": "lfm2_moe", "NemotronH": "nemotron_h", "Jamba": "jamba"}
    module = import_module(f"transformers.models.{folder[family]}.modeling_{folder[family]}")
    config = getattr(transformers, f"{family}Config")(**EAGER, **config)
    peer = getattr(module, f"{family}{kind}")(config).double().eval()
    rng = np.random.default_rng(1)
    for tensor in peer.state_dict().values():
        scale = tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.5
        tensor.copy_(torch.from_numpy(in_every_dtype(scale * rng.standard_normal(tensor.shape))))
    x = rng.standard_normal((2, 35, 12))

    with jax.enable_x64(True):
        layer = Experts(12, *sizes, **options, param_dtype=np.float64, rngs=nnx.Rngs(0))
        layer = from_torch(layer, peer.state_dict(), rows(layer))
        jax.tree.map(
            np.testing.assert_array_equal, to_torch(layer, rows(layer)), dict(peer.state_dict())
        )
        weights = to_torch(layer, "experts")
    assert_parity(peer, layer, x, weights=rows(layer), dtypes=["float64"])
    twin = torch_ref.Experts(12, *sizes, **options).double()
    twin.load_state_dict({key: torch.tensor(np.asarray(a)) for key, a in weights.items()})
    with InFloat64(), torch.no_grad():
        expected = peer(torch.from_numpy(x)).numpy()
        found = twin(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
