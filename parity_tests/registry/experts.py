"""Mixtures of experts with each kind of router."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from torch import Tensor, nn

import torch_ref
from jax_models import CausalConv1D, CausalConv1DState, Experts, SequenceLayer
from jax_models.weights import nested
from parity_tests.registry.case import Case
from parity_tests.registry.mutation import ROWS, Mutation, edited, exchanged, replaced, with_value

FEATURES, TAPS = 5, 3


class TorchConvolvedExperts(nn.Module):
    """Experts before a causal convolution."""

    def __init__(self, *sizes: int, **router: Any):
        super().__init__()
        self.experts = torch_ref.Experts(FEATURES, *sizes, **router)
        self.convolution = torch_ref.CausalConv1d(FEATURES, TAPS)

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None = None):
        return self.convolution(self.experts(x), state)


class ConvolvedExperts(SequenceLayer[CausalConv1DState]):
    """Experts before a causal convolution, because the layer of a case has a state.

    The router reads the inputs of the case, which are exact in every dtype. Otherwise, rounding
    could make it choose other experts.
    """

    def __init__(self, sizes: tuple[int, ...], *, router: dict[str, Any], **options: Any):
        super().__init__(FEATURES, **options)
        self.experts = Experts(FEATURES, *sizes, **router, **options)
        self.convolution = CausalConv1D(FEATURES, TAPS, **options)

    def init_state(self, batch_size):
        return self.convolution.init_state(batch_size)

    def sequence(self, x, state, rows):
        return self.convolution.sequence(self.experts(x), state, rows)

    def torch_layouts(self):
        """`twin`: the keys of `TorchConvolvedExperts`."""
        experts = self.experts.torch_layouts()["experts"]
        convolution = nested(self.convolution.torch_rows(), "convolution", "convolution.conv")
        return {"twin": [*nested(experts, "experts", "experts"), *convolution]}


def convolved(name: str, *sizes: int, **router: Any) -> Case:
    """A case with experts of these sizes, and with this router."""
    return Case(
        name,
        partial(TorchConvolvedExperts, *sizes, **router),
        partial(ConvolvedExperts, sizes, router=router),
        layout="twin",
        architecture="experts",
        reach=TAPS,
    )


BIASED: dict[str, Any] = {"scores": "sigmoid", "use_expert_bias": True}
GROUPED = {"num_groups": 4, "groups_per_token": 2}
WITHOUT_GATE = {"activation": "relu2", "gated": False}
GRANITE, JAMBA, QWEN, LFM2, NEMOTRON = (
    "Experts, softmax of the chosen",
    "Experts, softmax of all",
    "Experts, gated shared expert",
    "Experts, sigmoid and bias",
    "Experts, groups, relu² without gate",
)
CASES = [
    convolved(GRANITE, 4, 6, 2, shared_features=3),
    convolved(JAMBA, 4, 6, 2, normalize=False),
    convolved(QWEN, 4, 6, 3, shared_features=3, shared_gate=True),
    convolved(LFM2, 4, 6, 2, epsilon=0.1, scale=1.5, **BIASED),
    convolved(
        NEMOTRON, 4, 12, 3, scale=2.5, shared_features=3, **BIASED, **GROUPED, **WITHOUT_GATE
    ),
]


def biased_weights(weigh):
    """Computes the weights from the scores after the bias is added."""
    return lambda experts, scores, chosen: weigh(
        experts, scores + experts.expert_bias[...].astype(scores.dtype)[None], chosen
    )


def without_bias(layer):
    """Chooses experts by their scores alone."""
    layer.experts.expert_bias[...] *= 0


def without_output(_):
    """Forgets the shared expert."""
    return lambda experts, x: jnp.zeros_like(x)


def without_gate(_):
    """Forgets the gate of the shared expert."""
    return lambda experts, x: experts.shared(x)


def balanced(choose):
    """Chooses experts that the other tokens choose less, as if all had the same load."""
    return lambda experts, scores: choose(experts, scores - scores.mean(axis=0, keepdims=True))


forward = partial(Mutation, kind="forward")
EXPERTS = "jax_models.layers.experts.Experts"
MUTATIONS = [
    forward("weights not normalized", GRANITE, plant=with_value("experts", "normalize", False)),
    forward("weights normalized", JAMBA, plant=with_value("experts", "normalize", True)),
    forward(
        "shared gate forgotten", QWEN, plant=replaced(f"{EXPERTS}.shared_output", without_gate)
    ),
    forward("bias in the weights", LFM2, plant=replaced(f"{EXPERTS}.weigh", biased_weights)),
    forward("ε forgotten", LFM2, plant=with_value("experts", "epsilon", 1e-20)),
    forward("factor forgotten", LFM2, plant=with_value("experts", "scale", 1.0)),
    forward("groups ignored", NEMOTRON, plant=with_value("experts", "num_groups", 1)),
    forward("relu for relu²", NEMOTRON, plant=with_value("experts", "activation", "relu")),
    forward(
        "experts balanced over the batch",
        NEMOTRON,
        plant=replaced(f"{EXPERTS}.choose", balanced),
        check=ROWS,
    ),
    Mutation("bias forgotten", NEMOTRON, "weights", edited(without_bias)),
    Mutation(
        "gate and up exchanged",
        GRANITE,
        "weights",
        edited(exchanged("experts", "gate_kernel", "up_kernel")),
    ),
    Mutation(
        "gate and up of the shared expert exchanged",
        GRANITE,
        "weights",
        edited(exchanged("experts.shared", "gate_proj", "up_proj")),
    ),
]
