"""The classes of seed 000."""

from functools import partial

import torch
from torch import Tensor

import torch_ref
from jax_models import RGLRU, CausalConv1D, Hawk, HawkBlock
from jax_models.ops import LinearRecurrenceMethod
from parity_tests.registry.case import Case, slow_decays

OTHER_METHODS: dict[LinearRecurrenceMethod, str] = {
    "associative": "by associative scan",
    "chunked": "in chunks",
    "pallas_interpreted": "by kernel, interpreted",
}
"""What `auto` takes elsewhere than on a CPU, or not at all."""


def call_steps(twin, x, state, lengths=None):
    """The one-step classes of seed 000, whose state is a tensor or a tuple of them."""
    zero = twin.init_state(x.shape[0])
    single = isinstance(zero, Tensor)
    if state is None:
        state = zero
    elif single:
        (state,) = state
    ys = []
    for x_t in x.unbind(1):
        y, state = twin(x_t, state)
        ys.append(y)
    return torch.stack(ys, dim=1), (state,) if single else state


def call_rglru(twin, x, state, lengths=None):
    """The seed's RGLRU, whose output is its state."""
    state = twin.init_state(x.shape[0]) if state is None else state[0]
    ys = [state := twin(x_t, state) for x_t in x.unbind(1)]
    return torch.stack(ys, dim=1), (state,)


def hawk_cases() -> list[Case]:
    """The classes of seed 000, at decays inside (0, 1) and close to 1."""
    hawk = partial(Case, layout="hawk")
    return [
        hawk("RGLRU", partial(torch_ref.RGLRU, 5), partial(RGLRU, 5), call=call_rglru),
        hawk(
            "RGLRU close to a = 1",
            partial(torch_ref.RGLRU, 6),
            partial(RGLRU, 6),
            call=call_rglru,
            decays=slow_decays,
            dtypes=("float64", "float32"),  # between 1 − 2⁻⁸ and 1 bfloat16 has no number
        ),
        *(
            hawk(
                f"RGLRU {name}",
                partial(torch_ref.RGLRU, 5),
                partial(RGLRU, 5, method=method),
                call=call_rglru,
            )
            for method, name in OTHER_METHODS.items()
        ),
        *(
            hawk(
                f"CausalConv1D, kernel {size}",
                partial(torch_ref.CausalConv1d, 5, size),
                partial(CausalConv1D, 5, size),
                call=call_steps,
                reach=size,
            )
            for size in (1, 2, 4)
        ),
        *(
            hawk(
                f"Hawk, kernel {size}",
                partial(torch_ref.Hawk, 5, size),
                partial(Hawk, 5, kernel_size=size),
                call=call_steps,
            )
            for size in (1, 2, 4)
        ),
        hawk(
            "HawkBlock",
            partial(torch_ref.HawkBlock, 5, 7),
            partial(HawkBlock, 5, 7),
            call=call_steps,
        ),
    ]
