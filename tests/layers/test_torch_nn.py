"""Random configurations and lengths of torch.nn.RNN, LSTM and GRU in float64."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jax_models import GRU, LSTM, RNN
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import BATCH, TIME, Case
from parity_tests.registry.torch_nn import run_packed

FAMILIES = {"RNN": (nn.RNN, RNN), "LSTM": (nn.LSTM, LSTM), "GRU": (nn.GRU, GRU)}


@st.composite
def problems(draw):
    """A random case with its problem. The two sides name some options differently."""
    twin, layer = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    sizes = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    stack = {"num_layers": draw(st.integers(1, 3)), "bidirectional": draw(st.booleans())}
    bias = draw(st.booleans())
    of_twin, of_layer = stack | {"bias": bias}, stack | {"use_bias": bias}
    if layer is RNN:
        nonlinearity = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))}
        of_twin, of_layer = of_twin | nonlinearity, of_layer | nonlinearity
    if layer is LSTM and draw(st.booleans()):
        projection = draw(st.integers(1, sizes[1] - 1))
        of_twin, of_layer = (
            of_twin | {"proj_size": projection},
            of_layer | {"proj_features": projection},
        )
    case = Case(
        "",
        partial(twin, *sizes, batch_first=True, **of_twin),
        partial(layer, *sizes, **of_layer),
        layout="torch.nn",
        architecture="",
        call=run_packed,
    )
    rows = st.lists(st.integers(1, TIME), min_size=BATCH, max_size=BATCH).map(np.array)
    lengths, seed = draw(st.none() | rows), draw(st.integers(0, 2**16))
    return case.problem(given_state=draw(st.booleans()), lengths=lengths, seed=seed)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@given(problems())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_equals_torch_nn(problem):
    report = measure_twin(problem, ("float64",))
    assert report.passed, str(report)
