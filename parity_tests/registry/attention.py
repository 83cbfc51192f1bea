"""The attention block of seed 002."""

from functools import partial

import torch_ref
from jax_models import SelfAttentionBlock
from parity_tests.registry.case import Case, call_alone


def attention_cases() -> list[Case]:
    """Two heads."""
    return [
        Case(
            "SelfAttentionBlock",
            partial(torch_ref.SelfAttentionBlock, 6, 2),
            partial(SelfAttentionBlock, 6, 2, max_length=13),
            layout="annotated-hyena",
            call=call_alone,
            prefix=5,
        )
    ]
