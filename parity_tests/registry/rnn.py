"""The simple RNN, with the keys of torch_ref and of torch.nn, and the recurrent language model."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from torch import nn

import torch_ref
from jax_models import RNN, RNNLanguageModelConfig
from parity_tests.registry.case import Case, paired
from parity_tests.registry.mutation import (
    DOCUMENTS,
    ROLLOUT,
    STEPS,
    TRAJECTORY,
    Mutation,
    epsilon_doubled,
    gates_swapped,
    ignoring,
    replaced,
    transposed,
    zeroed,
)
from parity_tests.registry.torch_nn import torch_nn_cases

rnn = partial(paired, architecture="rnn", layout="scratch")
tanh = torch_nn_cases("RNN tanh", partial(nn.RNN, nonlinearity="tanh"), RNN, nonlinearity="tanh")
relu = torch_nn_cases("RNN relu", partial(nn.RNN, nonlinearity="relu"), RNN, nonlinearity="relu")


def language_model(name: str, layout: str, **options: Any) -> Case:
    """The case of a language model with these options.

    By default it has learned positions, as the original does.
    """
    config = RNNLanguageModelConfig(**{"context_length": 8, **options})
    twin = partial(torch_ref.RNNLanguageModel.from_config, config)
    return Case(name, twin, config.build, layout, "rnn_language_model", twin_state=False)


CASES = [
    rnn("RNNScratch tanh", partial(RNN, 5, 6), partial(torch_ref.RNNScratch, 5, 6)),
    rnn(
        "RNNScratch relu",
        partial(RNN, 5, 6, nonlinearity="relu"),
        partial(torch_ref.RNNScratch, 5, 6, nonlinearity="relu"),
    ),
    rnn(
        "RNNScratch no bias",
        partial(RNN, 5, 6, use_bias=False),
        partial(torch_ref.RNNScratch, 5, 6, use_bias=False),
    ),
    rnn(
        "RNNDeep",
        partial(RNN, 5, 6, num_layers=3),
        partial(torch_ref.RNNDeep, 5, 6, num_layers=3),
        layout="deep",
    ),
    rnn(
        "RNN U W b",
        partial(RNN, 5, 6, recurrent_bias=False),
        partial(torch_ref.RNN, 5, 6),
        layout="cell",
    ),
    *tanh,
    *relu,
    language_model("RNNLanguageModel", "scratch"),
    language_model(
        "RNNLanguageModel of LSTM",
        "torch.nn",
        vocab_size=11,
        context_length=None,
        cell="lstm",
        num_layers=2,
    ),
    language_model(
        "RNNLanguageModel of GRU", "torch.nn", vocab_size=11, context_length=9, cell="gru"
    ),
    language_model("RNNLanguageModel of minGRU", "minimal", cell="min_gru", num_layers=2),
    language_model("RNNLanguageModel of minLSTM", "minimal", cell="min_lstm"),
]


def adamw_with(**option):
    """Replaces an option of AdamW by another value."""

    def wrong(adamw):
        return lambda rate, b1, b2, **options: adamw(
            rate, **{"b1": b1, "b2": b2, **options, **option}
        )

    return replaced("optax.adamw", wrong)


def off_by_an_ulp(to_torch):
    """Moves each weight to the next floating number in the direction of 1."""
    return lambda *args: {
        key: np.nextafter(a, a.dtype.type(1)) for key, a in to_torch(*args).items()
    }


def positions_from_0(positions_after):
    """Starts each call at position 0."""
    return lambda start, *args: positions_after(jnp.zeros_like(start), *args)


def positions_without_reset(positions_after):
    """Counts positions through resets, as if a row were a single document."""
    return lambda start, time, reset: positions_after(start, time, None)


weights = partial(Mutation, kind="weights")
in_two_dtypes = partial(weights, dtypes=("float64", "float32"))
positions = "jax_models.ops.rows.positions_after"
masks = partial(Mutation, case="RNNLanguageModel", kind="states and masks")
training = partial(Mutation, case="RNNScratch tanh", kind="training", check=TRAJECTORY)

MUTATIONS = [
    in_two_dtypes("recurrent bias forgotten", "RNNScratch tanh", plant=zeroed("cells.0.bias_hh")),
    *(
        in_two_dtypes("recurrent matrix transposed", case, plant=transposed("cells.0.kernel_hh"))
        for case in ("RNNScratch tanh", "RNN U W b")
    ),
    weights(
        "weights an ulp off on the way back",
        "RNNScratch tanh",
        plant=replaced("parity_tests.weight_checks.to_torch", off_by_an_ulp),
        check="weights make the round trip bit for bit",
    ),
    Mutation(
        "relu for tanh",
        "RNNScratch tanh",
        "forward",
        replaced(
            "jax_models.ops.gated.definition.RNN_STEPS", lambda steps: {"tanh": steps["relu"]}
        ),
    ),
    weights(
        "gates i and f swapped",
        "RNNLanguageModel of LSTM",
        plant=gates_swapped("blocks.cells.0", 4),
        culprit="rnn",
    ),
    weights(
        "head's bias forgotten",
        "RNNLanguageModel of GRU",
        plant=zeroed("head.bias"),
        culprit="proj",
    ),
    Mutation(
        "epsilon doubled",
        "RNNLanguageModel",
        "forward",
        epsilon_doubled("norm"),
        culprit="layer_norm",
    ),
    masks("positions count from 0", plant=replaced(positions, positions_from_0), check=STEPS),
    masks(
        "positions count through documents",
        plant=replaced(positions, positions_without_reset),
        check=DOCUMENTS,
    ),
    *(
        Mutation(
            "a step forgets its reset",
            case,
            "states and masks",
            replaced(f"jax_models.{owner}.step", ignoring("reset")),
            check=ROLLOUT,
        )
        for case, owner in (
            ("RNNScratch tanh", "SequenceLayer"),
            ("RNNLanguageModel", "LanguageModel"),
        )
    ),
    training("weight decay of 0.0101", plant=adamw_with(weight_decay=0.0101)),
    training("epsilon of 1e-7", plant=adamw_with(eps=1e-7)),
    training("second beta of 0.9991", plant=adamw_with(b2=0.9991)),
    training("Nesterov's momentum", plant=adamw_with(nesterov=True)),
]

# Without compiled kernels, so that the times do not depend on what is installed.
COMPARED = {"RNN": lambda width, **options: RNN(width, width, method="xla", **options)}
