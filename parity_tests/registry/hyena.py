"""The Hyena blocks of seed 002."""

from functools import partial

import torch_ref
from jax_models import AuthenticHyenaBlock, HyenaBlock
from parity_tests.registry.case import Case, call_alone

MAX_LENGTH = 32
"""Longer than a block of the online convolution, so that states have a tile."""


def hyena_cases() -> list[Case]:
    """Both blocks, the paper's with both of its filters."""
    hyena = partial(Case, layout="annotated-hyena", call=call_alone, prefix=20)
    network = {"embed_features": 5, "mlp_features": 6, "num_filter_layers": 3}
    return [
        *(
            hyena(
                f"HyenaBlock, order {order}, kernel {size}",
                partial(torch_ref.HyenaBlock, 5, MAX_LENGTH, order=order, kernel_size=size),
                partial(HyenaBlock, 5, MAX_LENGTH, order=order, kernel_size=size),
            )
            for order, size in ((1, 4), (3, 3))
        ),
        *(
            hyena(
                f"AuthenticHyenaBlock, {name}, order {order}",
                partial(
                    torch_ref.AuthenticHyenaBlock,
                    5,
                    MAX_LENGTH,
                    order=order,
                    implicit=implicit,
                    **network,
                ),
                partial(
                    AuthenticHyenaBlock, 5, MAX_LENGTH, order=order, implicit=implicit, **network
                ),
            )
            for name, order, implicit in (("explicit", 2, False), ("implicit", 2, True))
        ),
    ]
