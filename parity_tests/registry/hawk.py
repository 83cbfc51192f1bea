"""Hawk, its parts, its block and its language model."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from torch import Tensor, nn

import torch_ref
from jax_models import RGLRU, CausalConv1D, Hawk, HawkBlock, HawkLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    epsilon_doubled,
    gelu_by_tanh,
    mask_ignored,
    replaced,
    transposed,
    two_swapped,
    zeroed,
)


def decays(twin: nn.Module) -> list[Tensor]:
    """The parameter `a` of every RG-LRU that has it."""
    layers = (m for m in twin.modules() if isinstance(m, torch_ref.RGLRU))
    return [layer.a.detach() for layer in layers if hasattr(layer, "a")]


def close_to_1(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers below 1 by 2⁻²³ to 2⁻¹⁰, exact in float32."""
    return 1 - 2.0 ** -rng.integers(10, 24, shape)


hawk = partial(paired, layout="hawk", architecture="hawk", bounded=decays)
DIRECT: dict[str, Any] = {"parameterization": "direct"}
AT_THE_BOUND = {"c": 5e-7}
"""With this `c`, √(1 − a²) is around 1/2000, where its derivative reaches the layer's limit."""
config = HawkLanguageModelConfig(
    vocab_size=11, features=6, num_layers=2, mlp_features=8, parameterization="direct"
)
softplus_config = dataclasses.replace(config, parameterization="softplus")

CASES = [
    hawk("RGLRU", partial(RGLRU, 5, **DIRECT)),
    hawk(
        "RGLRU close to a = 1",
        partial(RGLRU, 6, **DIRECT),
        draw_bounded=close_to_1,
        # bfloat16 has no number between 1 − 2⁻⁸ and 1
        dtypes=("float64", "float32"),
    ),
    hawk(
        "RGLRU by associative scan",
        partial(RGLRU, 5, method="associative", **DIRECT),
        partial(torch_ref.RGLRU, 5, **DIRECT),
    ),
    *(
        hawk(
            f"CausalConv1D, kernel {size}",
            partial(CausalConv1D, 5, size),
            partial(torch_ref.CausalConv1d, 5, size),
            reach=size,
        )
        for size in (1, 2, 4)
    ),
    *(
        hawk(f"Hawk, kernel {size}", partial(Hawk, 5, kernel_size=size, **DIRECT))
        for size in (1, 2, 4)
    ),
    hawk("HawkBlock", partial(HawkBlock, 5, 7, **DIRECT)),
    hawk("HawkLanguageModel", config.build, architecture="hawk_language_model", twin_state=False),
    hawk("RGLRU by softplus", partial(RGLRU, 5)),
    hawk("RGLRU by softplus, close to a = 1", partial(RGLRU, 5, **AT_THE_BOUND)),
    hawk(
        "HawkLanguageModel by softplus",
        softplus_config.build,
        architecture="hawk_language_model",
        twin_state=False,
    ),
]


def reverse_taps(layer):
    """Reverses the taps, as if torch's convolution were not a cross-correlation."""
    layer.kernel[...] = layer.kernel[...][::-1]


def halve_c(layer):
    """Halves `c`, so that the RG-LRU forgets half as fast."""
    layer.c /= 2


def decay_as_printed(a, exponent):
    """Computes √(1 − a²) as it is printed in the paper, which loses digits in float32."""
    p = jnp.broadcast_to(a, exponent.shape) ** exponent
    return p, jnp.sqrt(1 - p**2)


def decay_of_the_logit(softplus_decay):
    """Reads a_param as the logit of a instead of 1 − a."""
    return lambda a_param, *args: softplus_decay(-a_param, *args)


MUTATIONS = [
    *(
        Mutation("two weights of one shape swapped", case, "weights", two_swapped())
        for case in ("RGLRU", "Hawk, kernel 1")
    ),
    Mutation("taps in reverse order", "CausalConv1D, kernel 4", "weights", edited(reverse_taps)),
    Mutation(
        "convolution's bias forgotten",
        "HawkLanguageModel",
        "weights",
        zeroed("blocks.0.hawk.conv.bias"),
        culprit="blocks.0.hawk.conv.conv",
    ),
    Mutation(
        "input gate transposed",
        "HawkBlock",
        "weights",
        transposed("hawk.rglru.input_gate.kernel"),
        culprit="hawk.rglru",
    ),
    Mutation("half of c", "RGLRU", "forward", edited(halve_c)),
    Mutation(
        "√(1 − a²) as it is printed",
        "RGLRU close to a = 1",
        "forward",
        replaced("jax_models.ops.linear.rg_lru.decay", lambda _: decay_as_printed),
        dtypes=("float32",),
    ),
    Mutation(
        "a for 1 − a",
        "RGLRU by softplus",
        "forward",
        replaced("jax_models.ops.linear.rg_lru.softplus_decay", decay_of_the_logit),
    ),
    Mutation(
        "derivative of √(1 − a²) without a bound",
        "RGLRU by softplus, close to a = 1",
        "training",
        replaced("jax_models.ops.linear.rg_lru._bounded_sqrt", lambda _: jnp.sqrt),
    ),
    Mutation("gelu by tanh", "Hawk, kernel 1", "forward", gelu_by_tanh()),
    Mutation(
        "epsilon doubled",
        "HawkLanguageModel",
        "forward",
        epsilon_doubled("blocks.1.temporal_pre_norm"),
        culprit="blocks.1.temporal_pre_norm",
    ),
    *mask_ignored("CausalConv1D, kernel 4", "jax_models.ops.conv.causal_conv.delayed"),
    *mask_ignored("RGLRU", "jax_models.ops.linear.rg_lru.linear_recurrence"),
]

COMPARED = {"Hawk": Hawk, "Hawk, direct": partial(Hawk, parameterization="direct")}
