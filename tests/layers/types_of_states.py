"""The types of states. `make lint` checks this file; nothing runs it."""

from typing import assert_type

from jaxtyping import Array

from jax_models import (
    GRU,
    LSTM,
    GRUState,
    HyenaBlock,
    HyenaState,
    LanguageModelState,
    LSTMState,
    RWKVLanguageModel,
)


def layers(lstm: LSTM, gru: GRU, hyena: HyenaBlock, x: Array) -> None:
    assert_type(lstm(x), tuple[Array, LSTMState])
    assert_type(lstm.init_state(3).c, Array)
    assert_type(gru.step(x, gru.init_state(3)), tuple[Array, GRUState])
    assert_type(hyena(x)[1], HyenaState)


def models(model: RWKVLanguageModel, tokens: Array) -> None:
    assert_type(model(tokens), tuple[Array, LanguageModelState])
