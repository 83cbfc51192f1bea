"""Layers compute the same if their time axis is divided over devices."""

from functools import partial
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_models
from jax_models import ops
from jax_models.sequence import SequenceLayer
from parity_tests.registry import CASES, Case

TIME, DEVICES = 24, 4
assert_close = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11))


def wide_attention() -> SequenceLayer:
    """A layer whose window extends over the two previous devices."""
    return jax_models.LocalAttention(8, 2, window=9, param_dtype=jnp.float64, rngs=nnx.Rngs(0))


def both_directions() -> SequenceLayer:
    """A layer that also runs from the last step to the first."""
    case = CASES["S5, both directions"]
    return case.build_layer(case.build_twin())


PARTS = {"CausalConv1D", "GriffinRecurrence", "Hawk", "HippogriffHawk", "HyenaDNAMixer"}
PARTS |= {"StripedHyenaMixer", "RWKVTimeMix", "RWKV6TimeMix", "RWKV7TimeMix"}
PARTS |= {"RWKVChannelMix", "RWKV6ChannelMix", "RWKV7ChannelMix"}
"""Layers that are compared as parts of their blocks."""


def divisible_cases() -> dict[str, Case]:
    """The case whose outputs depend on the most steps, for each layer that can divide time."""
    cases: dict[str, Case] = {}
    for case in sorted(reversed(CASES.values()), key=lambda case: case.reach or inf):
        kind = getattr(case.layer, "func", None)  # known without building the layer
        if isinstance(kind, type) and issubclass(kind, SequenceLayer) and kind.divides_time:
            cases[kind.__name__] = case
    return cases


LAYERS = {
    name: lambda case=case: case.build_layer(case.build_twin())
    for name, case in divisible_cases().items()
    if name not in PARTS
} | {"LocalAttention, wide": wide_attention, "S5, both directions": both_directions}


def outputs_of(layer: SequenceLayer, of_device):
    """A function to the outputs and the last state."""
    graphdef, _, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, x, reset, start):
        y, state = nnx.merge(graphdef, params, rest)(x, start, reset=reset)
        return y, jax.tree.map(of_device, state)

    return run


def outputs_and_gradients_of(layer: SequenceLayer, of_device):
    """A function to the outputs, the last state and the gradients of x and weights."""
    run = outputs_of(layer, of_device)

    def differentiated(params, x, reset, start):
        def loss(params, x):
            y, state = run(params, x, reset, start)
            return jnp.sum(jnp.sin(y)), (y, state)

        gradients, (y, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, state, gradients[1], gradients[0]

    return differentiated


def check_divided(name: str) -> None:
    """Compares a layer over several devices with one device.

    It is called with a first state and `reset`, if it takes them, and without both, where gradients
    would only show the same again. The first row is never reset, so that its first state reaches
    all devices.
    """
    # A cache of keys has room for the steps before and after the first state.
    layer = nnx.view(LAYERS[name](), max_length=2 * TIME, raise_if_not_found=False)
    rng = np.random.default_rng(1)
    # Only long convolutions cannot be reset, and they also divide their features over the devices.
    devices = DEVICES if layer.resettable else layer.in_features
    time = TIME - TIME % devices
    x = jnp.asarray(rng.standard_normal((3, time, layer.in_features)))

    def begun(s):  # positions continue
        is_floating = jnp.issubdtype(s.dtype, jnp.floating)
        return jnp.asarray(rng.uniform(0.5, 1.5, s.shape)) if is_floating else s + 5

    start = jax.tree.map(begun, layer.init_state(3))
    given = None if layer.start(3) is None else start
    resets = rng.random((3, time)) < [[0], [0.15], [0.15]] if layer.resettable else None
    if resets is not None:
        resets[1, time // devices] = True  # the first step of a device
    mesh = jax.make_mesh((devices,), ("time",), axis_types=(AxisType.Auto,))
    of_time = P(None, "time")
    in_specs, out_specs = (P(), of_time, of_time, P()), (of_time, P("time"), of_time, P())
    params, view = nnx.state(layer, nnx.Param), nnx.view(layer, time_axis="time")
    calls = [(outputs_and_gradients_of, out_specs, (resets, given))]
    if layer.resettable:  # otherwise, both calls are the same
        calls.append((outputs_of, out_specs[:2], (None, None)))
    for function, specs, arguments in calls:
        whole = jax.jit(function(layer, lambda x: x))
        divided = function(view, lambda x: x[None])
        divided = jax.jit(jax.shard_map(divided, mesh=mesh, in_specs=in_specs, out_specs=specs))
        expected, last, *gradients = whole(params, x, *arguments)
        found, lasts, *found_gradients = divided(params, x, *arguments)
        assert_close((found, found_gradients), (expected, gradients))
        for device in range(devices):
            assert_close(jax.tree.map(lambda x, d=device: x[d], lasts), last)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_time_divided_over_devices_is_whole(on_eight_devices, name):
    """Compares outputs, states and gradients."""
    on_eight_devices(check_divided, name)


def check_factors_of_0() -> None:
    """Compares gradients of a linear recurrence whose factors are 0 on each device, for some rows.

    A factor of 0 has a gradient, although the state before it does not matter.
    """
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((5, TIME, 3))) for _ in range(2))
    a = a.at[0, ::5].set(0).at[1, 8].set(0).at[2, -1].set(0)
    start = jnp.asarray(rng.standard_normal((5, 3)))

    def gradients(time_axis):
        def loss(*arrays):
            h, _ = ops.linear_recurrence(*arrays, time_axis=time_axis)
            return jnp.sum(jnp.sin(h))

        return jax.grad(loss, argnums=(0, 1, 2))

    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AxisType.Auto,))
    specs = P(None, "time"), P(None, "time"), P()
    divided = jax.shard_map(gradients("time"), mesh=mesh, in_specs=specs, out_specs=specs)
    assert_close(jax.jit(divided)(a, b, start), jax.jit(gradients(None))(a, b, start))


@pytest.mark.slow
def test_factors_of_0_over_devices_have_their_gradients(on_eight_devices):
    on_eight_devices(check_factors_of_0)


def test_a_step_that_needs_the_one_before_is_refused():
    rngs = nnx.Rngs(0)
    indivisible = jax_models.LSTM(4, 4, rngs=rngs)
    for layer in (indivisible, jax_models.Stack([jax_models.RGLRU(4, rngs=rngs), indivisible])):
        with pytest.raises(NotImplementedError, match="time_axis: its time cannot be divided"):
            nnx.view(layer, time_axis="time")


def test_lengths_and_shapes_that_do_not_divide_are_refused():
    def in_shard_map(function, *args):
        mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P())
        return jax.eval_shape(mapped, *args)

    layer = nnx.view(jax_models.RGLRU(4, rngs=nnx.Rngs(0)), time_axis="time")
    with pytest.raises(NotImplementedError, match="lengths: expected None where time is divided"):
        in_shard_map(lambda x: layer(x, lengths=[3, 3])[0], jnp.ones((2, 5, 4)))
    with pytest.raises(ValueError, match="at least the 3 steps on each device"):
        in_shard_map(
            lambda x, s: ops.delayed(x, ops.CausalConv1DState(s), time_axis="time")[0],
            jnp.ones((2, 2, 4)),
            jnp.ones((2, 4, 3)),
        )
