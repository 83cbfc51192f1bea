"""The registry: one row a twin pair. Every check and the report run over every row."""

from parity_tests.cases.attention import attention_cases
from parity_tests.cases.case import (
    BATCH,
    DTYPES,
    PLATFORMS,
    TIME,
    Case,
    in_every_dtype,
    rg_lru_decays,
)
from parity_tests.cases.hawk import hawk_cases
from parity_tests.cases.hyena import hyena_cases
from parity_tests.cases.hyper_lstm import hyper_lstm_cases
from parity_tests.cases.language_models import language_model_cases
from parity_tests.cases.recurrent import seed_cases, torch_nn_cases
from parity_tests.cases.rwkv import rwkv_cases

CASES = {
    case.name: case
    for case in [
        *seed_cases(),
        *torch_nn_cases(),
        *hawk_cases(),
        *hyper_lstm_cases(),
        *rwkv_cases(),
        *hyena_cases(),
        *attention_cases(),
        *language_model_cases(),
    ]
}

__all__ = [
    "BATCH",
    "CASES",
    "DTYPES",
    "PLATFORMS",
    "TIME",
    "Case",
    "in_every_dtype",
    "rg_lru_decays",
]
