"""How the errors grow along a sequence."""

import numpy as np
import pytest

from parity_tests.registry import CASES
from parity_tests.report.command import main
from parity_tests.report.over_time import STEPS, by_step, errors_over_time
from parity_tests.report.record import Record


@pytest.mark.parametrize(
    ("case", "steps"), [("RNN U W b", STEPS), ("SelfAttentionBlock", 13), ("RNNLanguageModel", 8)]
)
def test_as_many_steps_as_the_layer_takes(case, steps):
    single, half = errors_over_time(CASES[case], "cpu")
    assert [single.dtype, half.dtype] == ["float32", "bfloat16"]
    for side in ("torch", "jax"):
        assert len(getattr(single, side)) == len(getattr(half, side)) == steps
        assert 1e-9 < max(getattr(single, side)) < 1e-6
        assert 1e-4 < max(getattr(half, side)) < 1e-1


def test_a_step_is_judged_by_its_own_size():
    oracle = np.random.default_rng(0).standard_normal((2, 3, 4)) * 10.0 ** np.arange(3)[:, None]
    y = oracle * np.array([1.001, 1.02, 1])[:, None]
    assert by_step(y, oracle) == (0.001, 0.02, 0)


def test_a_report_keeps_them(tmp_path, capsys):
    assert main(["--case", "RNN U W b", "--json", str(tmp_path / "report.json")]) == 0
    record = Record.from_json((tmp_path / "report.json").read_text())
    assert record.cases == {"RNN U W b": "rnn"}
    assert [errors.dtype for errors in record.over_time] == ["float32", "bfloat16"]
