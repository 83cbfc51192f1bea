"""Exported programs, and programs that are divided over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_models import state_batch_axes
from parity_tests.registry import CASES, LANGUAGE_MODELS, LAYERS, TIME

pytestmark = pytest.mark.slow
BATCH = 8
PLATFORMS = ("cpu", "cuda", "tpu")
rows = pytest.mark.parametrize("name", [*LAYERS, *LANGUAGE_MODELS])
SIZES = [(name, *sizes) for name in LAYERS for sizes in ((BATCH, TIME), ("b", "t"))]
"""The first cases with known sizes and with any. A language model would only show again what its
layers show, except in the forward pass for any size, which is the stored program below."""


def functions(name: str):
    """The outputs and the gradient of the weights as functions, and their arguments."""
    case = CASES[name]
    graphdef, params, rest = nnx.split(case.build_layer(case.build_twin()), nnx.Param, ...)
    x = jnp.asarray(case.inputs(batch=BATCH))

    def outputs(params, x, lengths=None):
        return nnx.merge(graphdef, params, rest)(x, lengths=lengths)[0]

    def gradient(params, x, lengths=None):
        return jax.grad(lambda params: jnp.sum(outputs(params, x, lengths) ** 2))(params)

    return outputs, gradient, params, x


def symbolic(name: str, x, batch, time):
    """The shape of x with these sizes. "b" and "t" stand for any number."""
    limit = CASES[name].max_length
    constraints = [f"t <= {limit}"] if limit and time == "t" else []
    sizes = export.symbolic_shape(f"{batch}, {time}", constraints=constraints)
    return jax.ShapeDtypeStruct((*sizes, *x.shape[2:]), x.dtype)


@pytest.mark.parametrize(("name", "batch", "time"), SIZES)
def test_is_exported_for_all_platforms_together(batch, time, name):
    """A layer with an FFT must know the number of steps.

    The forward pass for any size is the stored program below.
    """
    outputs, gradient, params, x = functions(name)
    for function in (gradient,) if time == "t" else (outputs, gradient):
        exported = export.export(jax.jit(function), platforms=PLATFORMS)
        if CASES[name].mixes_steps and time == "t":
            with pytest.raises(NotImplementedError, match="v:"):
                exported(params, symbolic(name, x, BATCH, "t"))
            exported(params, symbolic(name, x, batch, TIME))
        else:
            exported(params, symbolic(name, x, batch, time))


@rows
def test_a_stored_program_runs_with_states_at_any_size(name):
    """No class of ours has to be registered before."""
    pytest.importorskip("flatbuffers")
    case = CASES[name]
    layer, x = case.build_layer(case.build_twin()), jnp.asarray(case.inputs(batch=3))
    any_x = symbolic(name, x, "b", TIME if case.mixes_steps else "t")
    any_state = jax.eval_shape(lambda: layer.init_state(any_x.shape[0]))
    exported = export.export(jax.jit(lambda x, state: layer(x, state)), platforms=PLATFORMS)
    stored = exported(any_x, any_state).serialize()
    state = layer.init_state(3)
    result = export.deserialize(stored).call(x, state)
    expected = jax.jit(layer.__call__)(x, state)
    same = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(same, result, expected)


@rows
def test_is_checked_inside_shard_map(name):
    """Only traces, because the types say which arrays vary over the devices."""
    case, (_, gradient, params, x) = CASES[name], functions(name)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    lengths = jnp.arange(BATCH) % x.shape[1]
    in_specs = (P(), P("data"), P("data"))

    graphdef, _, rest = nnx.split(case.build_layer(case.build_twin()), nnx.Param, ...)

    def padded(params, x, lengths):
        layer = nnx.merge(graphdef, params, rest)
        y, state = layer(x, lengths=lengths)
        return (y, layer.step(x[:, 0], state)[0]) if case.causal else y

    def packed(params, x, lengths):
        layer = nnx.merge(graphdef, params, rest)
        reset = jnp.arange(x.shape[1])[None] == lengths[:, None]
        starts = {"starts": lengths // 2} if case.takes_starts else {}
        y, _ = layer(x, reset=reset, **starts)
        if case.causal:
            layer.step(x[:, 0], layer.init_state(len(x)), reset=reset[:, 0])
        return y

    resets = ((packed, P("data")),) if case.resettable else ()
    for function, spec in ((padded, P("data")), (gradient, P()), *resets):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=spec)
        jax.eval_shape(mapped, params, x, lengths)


@rows
def test_runs_with_sharded_weights_and_inputs_under_explicit_axes(name):
    """Only traces, because the types include the sharding."""
    case = CASES[name]
    mesh = jax.make_mesh((1, 1), ("data", "model"))

    def sharded(array, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def specs(tree):
        return [leaf.sharding.spec for leaf in jax.tree.leaves(tree)]

    graphdef, params, rest = nnx.split(case.abstract(), nnx.Param, ...)
    params = jax.tree.map(lambda p: sharded(p, *[None] * (p.ndim - 1), "model"), params)
    x, reset = sharded(case.inputs(), "data"), sharded(np.zeros((3, TIME), bool), "data")
    starts = {"starts": sharded(np.zeros(3, int), "data")} if case.takes_starts else {}

    def gradient(params, rest, x, reset, starts):
        def loss(params):
            layer = nnx.merge(graphdef, params, rest)
            y, state = layer(x, reset=reset if case.resettable else None, **starts)
            y, last_state = layer(x, state)
            return jnp.sum(y), (y, state, last_state)

        return jax.grad(loss, has_aux=True)(params)

    with jax.set_mesh(mesh):
        found, (y, state, last_state) = jax.eval_shape(gradient, params, rest, x, reset, starts)
    assert specs(found) == specs(params)
    assert y.sharding.spec[0] == "data"
    assert specs(last_state) == specs(state)
    batch_axes = jax.tree.leaves(state_batch_axes(case.abstract()))
    assert [spec.index("data") for spec in specs(state)] == batch_axes
