"""minGRU and minLSTM."""

from functools import partial

import jax.numpy as jnp

from jax_models import MinGRU, MinLSTM
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, mask_ignored, zeroed

min_rnn = partial(paired, architecture="min_rnn", layout="minimal")

CASES = [
    min_rnn("MinGRU", partial(MinGRU, 5, 6)),
    min_rnn("MinGRU, 2 layers, no bias", partial(MinGRU, 5, 6, num_layers=2, use_bias=False)),
    min_rnn("MinLSTM", partial(MinLSTM, 5, 6)),
    min_rnn("MinLSTM, 2 layers", partial(MinLSTM, 5, 6, num_layers=2)),
]


def swap_gates(layer):
    """Swaps the first two gates of the first layer."""
    linear = layer.gates[0]
    for weight in (linear.kernel, linear.bias):
        first, second, *rest = jnp.split(weight[...], len(layer.gate_names), axis=-1)
        weight[...] = jnp.concatenate([second, first, *rest], axis=-1)


weights = partial(Mutation, kind="weights", dtypes=("float64", "float32"))

MUTATIONS = [
    weights("gates z and h swapped", "MinGRU", plant=edited(swap_gates)),
    weights("gates f and i swapped", "MinLSTM", plant=edited(swap_gates)),
    weights("second layer's biases forgotten", "MinLSTM, 2 layers", plant=zeroed("gates.1.bias")),
    *(
        fault
        for case in ("MinGRU", "MinLSTM")
        for fault in mask_ignored(case, "jax_models.ops.linear.min_rnn.linear_recurrence")
    ),
]

COMPARED = {"MinGRU": lambda width, **options: MinGRU(width, width, **options)}
