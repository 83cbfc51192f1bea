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
from jax_models.weights import linear, transposed, unused
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


def test_each_weight_of_a_wrapper_has_its_call_in_the_error():
    module = nn.Sequential(nn.LSTM(5, 6), nn.Linear(6, 2))
    for child, name in ((module[0], "weight_ih_l0"), (module[0], NAME), (module[1], "weight")):
        parametrizations.weight_norm(child, name)
    [wrapped] = find_wrapped(module.state_dict())
    [calls] = re.findall("call (.*) before", wrapped.description)
    for call in calls.split(" and "):
        eval(call)
    assert not find_wrapped(module.state_dict())
    many = find_wrapped(f"{i}.weight_{end}" for i in range(4) for end in "gv")
    assert "and so on, for each of these 4 weights, before" in many[0].description


def with_adapter(prefix: str) -> dict:
    """The state_dict of peft for an LSTM."""
    weights = {f"{prefix}base_layer.{k}": v for k, v in nn.LSTM(5, 6).state_dict().items()}
    lora = {"lora_A.default.weight": (2, 5), "lora_B.default.weight": (24, 2)}
    return weights | {prefix + key: torch.zeros(shape) for key, shape in lora.items()}


@pytest.mark.parametrize("prefix", ["", "rnn.", "module.rnn."])
@pytest.mark.parametrize("layout", [None, "torch.nn"])
def test_no_prefix_leads_into_a_wrapper(prefix, layout):
    """Under such a prefix, the base layer alone would be read and the adapter would be lost."""
    layer, weights = LSTM(5, 6, rngs=nnx.Rngs(0)), with_adapter(prefix)
    inside = f"{prefix}base_layer."
    keys = rf"an adapter of peft \({re.escape(inside)}.*\): {ADAPTER}"
    with pytest.raises(ValueError, match=f"^state_dict: it has keys of {keys}"):
        from_torch(layer, weights, layout)
    for given in (inside, inside[:-1]):
        with pytest.raises(ValueError, match=f'^prefix: "{re.escape(inside)}" leads into {keys}'):
            from_torch(layer, weights, layout, prefix=given)
    # Nothing is lost if the adapter is elsewhere, or if the name is that of a user's own module.
    other = {key: value for key, value in weights.items() if "lora" not in key}
    for beside in ("head.weight", "head.lora_A.default.weight"):
        from_torch(layer, other | {beside: torch.zeros(3)}, layout, prefix=inside)


def test_a_prefix_does_not_end_inside_a_parametrization():
    module = parametrizations.orthogonal(nn.Linear(4, 4, bias=False))
    table = [transposed("kernel", "original"), unused("0.base", torch.zeros(4, 4).numpy())]
    port = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^prefix: .* leads into an orthogonal .*remove_param"):
        from_torch(port, module.state_dict(), table, prefix="parametrizations.weight.")


def test_another_place_is_proposed_in_the_place_of_a_wrapped_one():
    weights = with_adapter("a.") | {f"b.{k}": v for k, v in nn.LSTM(5, 6).state_dict().items()}
    with pytest.raises(ValueError, match=r'give prefix="b\."$'):
        from_torch(LSTM(5, 6, rngs=nnx.Rngs(0)), weights)


def names(*keys: str) -> dict:
    return dict.fromkeys(keys, np.zeros(3))


@pytest.mark.parametrize(
    ("description", "state_dict"),
    [
        # peft 0.21: get_peft_model(model, LoraConfig(…)).state_dict(), and the same with IA3Config
        (ADAPTER, names("fc.base_layer.weight", "fc.lora_A.default.weight")),
        (ADAPTER, names("base_model.model.fc.lora_A.weight", "base_model.model.fc.lora_B.weight")),
        (ADAPTER, names("base_model.model.fc.ia3_l")),
        (ADAPTER, names("fc.vera_lambda_b.default")),
        (ADAPTER, names("fc.original_module.weight", "fc.modules_to_save.default.weight")),
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
