"""RWKV-4's parts."""

from functools import partial

import torch_ref
from jax_models import RWKVBlock, RWKVChannelMix, RWKVTimeMix
from parity_tests.registry.case import Case


def call_sequence(twin, x, state, lengths=None):
    """Classes with our own contract, their state a tuple."""
    return twin(x, state)


def rwkv_cases() -> list[Case]:
    """RWKV-4's parts."""
    rwkv = partial(Case, layout="blinkdl", call=call_sequence)
    return [
        rwkv("RWKVTimeMix", partial(torch_ref.RWKVTimeMix, 5), partial(RWKVTimeMix, 5)),
        rwkv(
            "RWKVTimeMix by associative scan",
            partial(torch_ref.RWKVTimeMix, 5),
            partial(RWKVTimeMix, 5, method="associative"),
        ),
        rwkv(
            "RWKVTimeMix by kernel, interpreted",
            partial(torch_ref.RWKVTimeMix, 5),
            partial(RWKVTimeMix, 5, method="pallas_interpreted"),
        ),
        rwkv(
            "RWKVChannelMix",
            partial(torch_ref.RWKVChannelMix, 5, 7),
            partial(RWKVChannelMix, 5, 7),
            reach=2,
        ),
        rwkv("RWKVBlock", partial(torch_ref.RWKVBlock, 5, 7, first=True), partial(RWKVBlock, 5, 7)),
    ]
