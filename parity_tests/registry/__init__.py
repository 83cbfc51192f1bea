"""The registry: one row a twin pair. Every check and the report run over every row."""

from parity_tests.registry.attention import attention_cases
from parity_tests.registry.case import BATCH, TIME, Case, rg_lru_decays
from parity_tests.registry.hawk import hawk_cases
from parity_tests.registry.hyena import hyena_cases
from parity_tests.registry.hyper_lstm import hyper_lstm_cases
from parity_tests.registry.language_models import language_model_cases
from parity_tests.registry.recurrent import seed_cases, torch_nn_cases
from parity_tests.registry.rwkv import rwkv_cases

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
    "TIME",
    "Case",
    "rg_lru_decays",
]
