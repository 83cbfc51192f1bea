"""State dicts in which a wrapper stores a weight as something else, such as weight norm."""

import re

import numpy as np
import pytest
import torch
from flax import nnx
from published import MODELS, abstract
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

from jax_models import LSTM, from_torch
from jax_models.models.load import config_of
from jax_models.weights import linear
from jax_models.weights.wrappers import find_wrapped
from parity_tests import compare, draft_table

nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")
NAME = "weight_hh_l0"
REMOVE = rf'call torch\.nn\.utils\.{{}}\(module, "{NAME}"\) before module\.state_dict\(\)$'
PARAMETRIZED = REMOVE.format(r"parametrize\.remove_parametrizations")
ADAPTER = r"call model\.merge_and_unload\(\)"
WRAPPED = {
    rf"weight norm \(parametrizations.*\): {PARAMETRIZED}": parametrizations.weight_norm,
    rf"spectral norm \(.*\): {PARAMETRIZED}": parametrizations.spectral_norm,
    rf"an orthogonal parametrization \(.*\): {PARAMETRIZED}": parametrizations.orthogonal,
    rf"weight norm \({NAME}_g, {NAME}_v\): {REMOVE.format('remove_weight_norm')}": (
        utils.weight_norm
    ),
    rf"spectral norm \(.*\): {REMOVE.format('remove_spectral_norm')}": utils.spectral_norm,
    rf"pruning \(.*\): {REMOVE.format('prune.remove')}": lambda module, name: (
        prune.random_unstructured(module, name, 0.5)
    ),
}


@pytest.mark.parametrize("description", WRAPPED)
def test_a_wrapped_weight_is_recognized_instead_of_suggested(description):
    weights = WRAPPED[description](nn.LSTM(5, 6), NAME).state_dict()
    with pytest.raises(ValueError, match=f"(?m)  unexpected keys of {description}") as error:
        from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), weights)
    lines = str(error.value).splitlines()
    assert [line for line in lines if "missing" in line] == [f"  missing key {NAME}, shape (24, 6)"]
    assert len(lines) == 3


@pytest.mark.parametrize("wrap", WRAPPED.values())
def test_the_call_in_the_error_gives_the_weight_of_a_submodule_back(wrap):
    module = nn.Sequential(nn.ReLU(), wrap(nn.LSTM(5, 6), NAME))
    [wrapped] = find_wrapped(module.state_dict())
    _, call, _ = re.split("call | before ", wrapped.description)
    eval(call)
    assert f"1.{NAME}" in module.state_dict()


def names(*keys: str) -> dict:
    return dict.fromkeys(keys, np.zeros(3))


@pytest.mark.parametrize(
    ("description", "state_dict"),
    [
        # peft 0.21: get_peft_model(model, LoraConfig(…)).state_dict(), and the same with IA3Config
        (ADAPTER, names("fc.base_layer.weight", "fc.lora_A.default.weight")),
        (ADAPTER, names("base_model.model.fc.lora_A.weight", "base_model.model.fc.lora_B.weight")),
        (ADAPTER, names("base_model.model.fc.ia3_l")),
        # bitsandbytes in 4 and 8 bits, and GPTQ
        ("of bitsandbytes", names("q.weight", "q.weight.absmax", "q.weight.quant_map")),
        ("of bitsandbytes", names("q.weight", "q.SCB")),
        ("quantized weights", names("q.qweight", "q.qzeros", "q.scales", "q.g_idx")),
        # torch.ao.quantization.quantize_dynamic of a Linear and an LSTM
        ("quantized weights of torch", names("0.scale", "0._packed_params._packed_params")),
        ("quantized weights of torch", names("1._all_weight_values.0.param")),
        ("torch.compile .*k.replace", torch.compile(nn.Linear(3, 4)).state_dict()),
        ("DataParallel .*removeprefix", nn.DataParallel(nn.Linear(3, 4)).state_dict()),
    ],
)
def test_a_checkpoint_of_a_wrapped_model_is_refused(description, state_dict):
    with pytest.raises(ValueError, match=rf"^state_dict: it has keys of .*{description}"):
        config_of(state_dict)
    with pytest.raises(ValueError, match=rf"^state_dict: it has keys of .*{description}"):
        from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), state_dict)


def test_a_table_that_is_compared_or_drafted_has_no_row_for_a_wrapped_weight():
    module = parametrizations.weight_norm(nn.Linear(3, 4))
    port = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    assert "# keys of weight norm (parametrizations.weight.original0, " in draft_table(module, port)
    assert 'original1"' not in draft_table(module, port)
    with pytest.raises(ValueError, match=r"unexpected keys of weight norm .*remove_param"):
        compare(module, port, np.ones((2, 3)), weights=linear("", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_published_layout_looks_wrapped(name):
    for table in abstract(MODELS[name]).torch_layouts().values():
        assert not find_wrapped(key for row in table for key in row.keys)


def test_an_unexpected_weight_is_suggested_for_a_weight_but_not_for_a_bias():
    weights = nn.LSTM(5, 6, bias=False).state_dict() | {"bias_ih_l0": torch.zeros(24)}
    given = weights | {"norm.weight": torch.zeros(24)}
    with pytest.raises(ValueError, match=r"missing key bias_hh_l0, shape \(24,\)\n"):
        from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), given)
    given = weights | {"bias_hh": torch.zeros(24)}
    with pytest.raises(ValueError, match=r"missing key bias_hh_l0, .*: the unexpected bias_hh has"):
        from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), given)
