"""What weight tables refuse, and how they say so."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jax_models import GRU, LSTM, RNN, from_torch, to_torch
from jax_models.torch_weights import same, transposed
from parity_tests.tolerance import assert_same


def lstm(**kwargs) -> LSTM:
    return LSTM(5, 6, rngs=nnx.Rngs(0), **kwargs)


def snapshot(layer) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(layer))]


def test_all_faults_are_listed_and_the_layer_is_left_alone():
    weights = torch.nn.LSTM(5, 6).state_dict()
    weights["weight_ih_l0"] = weights["weight_ih_l0"].T
    weights["bias_hh_l0"] = weights["bias_hh_l0"].double()
    del weights["weight_hh_l0"]
    weights["extra"] = torch.zeros(1)
    layer = lstm()
    before = snapshot(layer)
    with pytest.raises(
        ValueError, match=r"state_dict does not fit LSTM in layout 'torch\.nn'"
    ) as e:
        from_torch(layer, weights)
    for line in (
        "weight_ih_l0: expected shape (24, 5), got (5, 24)",
        "missing key weight_hh_l0, shape (24, 6)",
        "bias_hh_l0: float64 does not fit into float32 exactly",
        "unexpected key extra",
    ):
        assert line in str(e.value)
    chex.assert_trees_all_equal(snapshot(layer), before)


def test_a_layout_is_found_by_its_keys():
    for twin, layer in (
        (torch.nn.LSTM, LSTM),
        (torch_ref.LSTMScratch, LSTM),
        (torch_ref.RNN, RNN),
        (torch_ref.RNNDeep, RNN),
    ):
        twin = twin(5, 6).double()
        layer = from_torch(
            layer(5, 6, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), twin.state_dict()
        )
        x = torch.randn(4, 2, 5).double()
        y, _ = layer(x.transpose(0, 1).numpy())
        with torch.no_grad():
            assert_same(y, twin(x)[0].transpose(0, 1).numpy(), "outputs")


def test_keys_of_no_layout_and_unknown_layouts():
    with pytest.raises(ValueError, match="are of no layout that LSTM with these options"):
        from_torch(lstm(), {"kernel": np.zeros(3)})
    with pytest.raises(ValueError, match=r"has \['scratch', 'torch.nn'\], not 'keras'"):
        to_torch(lstm(), layout="keras")
    with pytest.raises(ValueError, match="not 'scratch'"):
        to_torch(lstm(num_layers=2), layout="scratch")


def test_a_foreign_module_needs_a_table():
    module, layer = torch.nn.Linear(3, 4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="Linear knows no layout of its own"):
        from_torch(layer, module.state_dict())
    table = [transposed("kernel", "weight"), same("bias", "bias")]
    weights = to_torch(from_torch(layer, module.state_dict(), table), table)
    for key, tensor in module.state_dict().items():
        np.testing.assert_array_equal(weights[key], tensor.numpy())
    with pytest.raises(ValueError, match=r"names the parameters \['kernel'\], but Linear has"):
        to_torch(layer, table[:1])


def test_a_layer_that_torch_has_not():
    layer = lstm(proj_features=3, proj_bias=True, num_layers=2)
    with pytest.raises(ValueError, match="no torch module has the options of this LSTM"):
        to_torch(layer)
    with pytest.raises(ValueError, match="no torch module has the options of this LSTM"):
        from_torch(layer, torch.nn.LSTM(5, 6).state_dict())


def test_a_module_is_no_state_dict():
    with pytest.raises(TypeError, match=r"as module.state_dict\(\) gives it, got LSTM"):
        from_torch(lstm(), torch.nn.LSTM(5, 6))  # pyright: ignore[reportArgumentType]


def test_weights_of_a_narrower_dtype_are_widened_exactly():
    module = torch.nn.GRU(5, 6).bfloat16()
    layer = from_torch(GRU(5, 6, rngs=nnx.Rngs(0)), module.state_dict())
    weights = to_torch(layer)
    for key, tensor in module.state_dict().items():
        assert weights[key].dtype == np.float32
        np.testing.assert_array_equal(weights[key], tensor.float().numpy())


def test_one_bias_goes_into_two_and_their_sum_comes_back():
    twin = torch_ref.RNN(5, 6)
    with torch.no_grad():
        twin.b.normal_()
        twin.b[0], twin.b[1] = 0.0, -0.0
    layer = from_torch(RNN(5, 6, rngs=nnx.Rngs(0)), twin.state_dict())
    assert to_torch(layer, "cell")["b"].tobytes() == twin.b.detach().numpy().tobytes()
    cell = layer.cells[0]
    cell.bias_hh[...] = jnp.full(6, 0.25)
    np.testing.assert_array_equal(to_torch(layer, "cell")["b"], twin.b.detach().numpy() + 0.25)


def test_neither_side_shares_memory():
    module = torch.nn.RNN(5, 6)
    layer = from_torch(RNN(5, 6, rngs=nnx.Rngs(0)), module.state_dict())
    before = to_torch(layer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for array in before.values():
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.any()
        array[...] = 0
    assert all(array.any() for array in to_torch(layer).values())


def test_bfloat16_arrays_are_read_by_torch_as_documented():
    module = torch.nn.LSTM(5, 6).bfloat16()
    layer = from_torch(lstm(param_dtype=jnp.bfloat16), module.state_dict())
    for key, array in to_torch(layer).items():
        assert array.dtype == ml_dtypes.bfloat16
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        assert torch.equal(tensor, module.state_dict()[key])


def test_an_abstract_layer_takes_weights():
    module = torch.nn.LSTM(5, 6).double()
    abstract = nnx.eval_shape(lambda: lstm(param_dtype=jnp.float64))
    layer = from_torch(abstract, module.state_dict())
    x = torch.randn(2, 3, 5).double()
    with torch.no_grad():
        expected, _ = module(x.transpose(0, 1))
    y, _ = jax.jit(layer)(x.numpy())
    assert_same(y, expected.transpose(0, 1).numpy(), "outputs")
