"""The attention block of The Annotated Hyena."""

from functools import partial

import torch_ref
from jax_models import SelfAttentionBlock
from parity_tests.registry.case import Case
from parity_tests.registry.mutation import Mutation, mask_ignored, replaced, two_swapped

CASES = [
    Case(
        "SelfAttentionBlock",
        partial(torch_ref.SelfAttentionBlock, 6, 2),
        partial(SelfAttentionBlock, 6, 2, max_length=13),
        layout="annotated-hyena",
        architecture="attention",
        twin_state=False,
        prefix=5,
    )
]


def keys_for_queries(attention):
    """Swaps queries and keys in the attention scores."""
    return lambda q, k, *args, **options: attention(k, q, *args, **options)


OPERATOR = "jax_models.ops.local_attention"
MUTATIONS = [
    Mutation("two weights of one shape swapped", "SelfAttentionBlock", "weights", two_swapped()),
    Mutation(
        "queries and keys swapped",
        "SelfAttentionBlock",
        "forward",
        replaced(OPERATOR, keys_for_queries),
    ),
    *mask_ignored("SelfAttentionBlock", OPERATOR),
]
