"""Compare any torch module with any JAX port of it."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models import from_torch, to_torch
from jax_models.ops.checks import checked_bool
from jax_models.weights import Table
from jax_models.weights.transfer import as_numpy, gradients_to_torch, weight_table
from parity_tests.engine.listeners import tell
from parity_tests.engine.locate import checked_names, find_departure, where_it_raises
from parity_tests.engine.measure import Report, measure
from parity_tests.engine.problem import (
    Problem,
    check_functions,
    checked_arrays,
    checked_dtypes,
    checked_int,
    checked_platform,
)

Loader = Callable[[Mapping[str, Any]], Any]
"""Makes the JAX side's weights, an `nnx.Module` or any tree of arrays, of a state_dict."""


def compare(
    twin: torch.nn.Module,
    model: nnx.Module | Callable[..., Any],
    *inputs: Any,
    weights: Table | Loader | str | None = None,
    call: Callable[..., Any] | None = None,
    call_twin: Callable[..., Any] | None = None,
    dtypes: Iterable[str] = ("float64", "float32"),
    platform: str = "cpu",
    seed: int = 0,
    locate: bool = False,
    names: Mapping[str, str] | None = None,
    logits: str | bool = False,
) -> Report:
    """Compare a torch module with its JAX port: outputs, states and gradients, in each dtype.

    Both run, in evaluation mode, on copies in each dtype, and are measured against the torch module
    in float64; the gradients are those of random cotangents. JAX may err by 1e-12 in float64, and
    elsewhere by 4 times what torch errs, or by what its conditioning explains (`docs/bound.md`).

    Args:
        twin: the torch module, with its weights. Random biases show more than zero ones.
        model: an `nnx.Module`, or a function of weights and inputs (then `weights` is a loader).
        inputs: arrays, or trees of arrays, for both sides; floating ones are cast to each dtype.
        weights: how the twin's weights become the model's: a weight table (`jax_models.weights`),
            the name of one of the model's own layouts, or a loader, a function of a `state_dict` of
            arrays that returns an `nnx.Module` or what the function `model` takes. By default the
            model's own layout; a foreign module without `weights` keeps those that it has, and its
            weight gradients are not compared.
        call: how the JAX side is called with the inputs; by default `model(*inputs)`, or
            `model(weights, *inputs)` if it is a function. Both calls return an array, or a tree of
            arrays whose leaves come in the same order; of a tuple, all but the first is state.
        call_twin: the same of the torch side; by default `twin(*inputs)`.
        dtypes: those to compare in.
        platform: where JAX runs: "cpu", "gpu" or "tpu".
        seed: of the cotangents.
        locate: say by submodule where a pair that fails first departs, forward or else backward.
            Modules of NNX, Linen, Equinox, haiku and Keras are compared with the torch submodules
            that have the same weights, name or place, and values with those that `tap` names; what
            is left is looked for among all numbers that JAX computes.
        names: the JAX path of a torch submodule, by name, where that does not tell.
        logits: True, or the name of an output as the report gives it (`y['logits']`): its last
            axis is the vocabulary, and the report has KL, |Δ log p| and agreements of it, too.

    Raises:
        ValueError: the weights do not fit the model; all faults are listed.
        TypeError: a function without a loader, or a result that is no tree of arrays.

    """
    dtypes, seed = checked_dtypes(dtypes), checked_int("seed", seed, 0)
    platform, locate = checked_platform(platform), checked_bool("locate", locate)
    check_functions({}, {"call": call, "call_twin": call_twin})
    with jax.enable_x64(True):
        problem, faults, notes = port(
            twin,
            model,
            weights,
            call,
            **({} if call_twin is None else {"call_twin": call_twin}),
            inputs=checked_arrays("inputs", inputs),
            dtypes=dtypes,
            seed=seed,
            logits=checked_logits(logits),
        )
        names = checked_names(names, twin, model)
        try:
            report = measure(problem, problem.dtypes, platform)
        except Exception as error:
            where = where_it_raises(problem, problem.dtypes[0]) if locate else None
            if where is not None:
                error.add_note(f"in JAX's {where or 'outermost module'}")
            raise
        location = None
        if locate and not report.passed:
            fallback = (problem.dtypes[0], "", None)
            dtype, _, error = next(report.failures, fallback)
            bound = error.bound if error is not None and dtype == "float64" else 0.0
            location = find_departure(problem, dtype, names, bound)
    report = dataclasses.replace(
        report, faults=(*faults, *report.faults), notes=(*notes, *report.notes), location=location
    )
    tell(report)
    return report


def assert_parity(*args: Any, locate: bool = True, **kwargs: Any) -> None:
    """Assert that `compare(…)` passes; the message has what fails, and where it begins."""
    __tracebackhide__ = True
    report = compare(*args, locate=locate, **kwargs)
    if not report.passed:
        raise AssertionError(f"the two sides differ\n{report.short}")


def checked_logits(logits: str | bool) -> str | bool:
    """`logits`, of the right type.

    Raises:
        TypeError: it is another.

    """
    if not isinstance(logits, str | bool):
        raise TypeError(f"logits: expected True, False or a name, got {logits!r}")
    return logits


def port(
    twin: torch.nn.Module, model: Any, weights: Any, call: Any = None, **fields: Any
) -> tuple[Problem, list[str], list[str]]:
    """The problem with these fields, the faults of the weights, and what cannot be compared."""
    if not isinstance(twin, torch.nn.Module):
        raise TypeError(f"twin: expected a torch.nn.Module, got {_kind(twin)}")
    is_function = callable(model) and not isinstance(model, type | torch.nn.Module)
    if not isinstance(model, nnx.Module) and not is_function:
        raise TypeError(
            f"model: expected an nnx.Module or a function of weights, got {_kind(model)}"
        )
    if any(weight.is_meta for weight in twin.state_dict().values()):
        raise ValueError("twin: expected weights, got a module on the device meta, which has none")
    if isinstance(model, nnx.Module) and any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model))
    ):
        raise ValueError("model: expected weights, got a module of nnx.eval_shape, which has none")
    start = partial(Problem, twin=copy.deepcopy(twin).cpu().eval(), **fields)
    if isinstance(model, nnx.Module):
        return _of_module(start, twin, model, weights, call)
    return _of_loader(start, twin, model, weights, call)


def _kind(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"the class {name}" if isinstance(value, type) else name


Start = Callable[..., Problem]
"""A `Problem` but for its JAX side."""


def _of_module(
    start: Start, twin: torch.nn.Module, model: nnx.Module, weights: Any, call: Any
) -> tuple[Problem, list[str], list[str]]:
    """A module with a table, or with the weights that it has."""
    if callable(weights):
        raise TypeError(
            "weights: a loader makes the weights itself: give it with a function as `model`, "
            "`lambda weights, *inputs: …`"
        )
    start = partial(start, call=call or (lambda model, *inputs: model(*inputs)))
    if weights is None and not hasattr(model, "torch_layouts"):
        note = "weight gradients are not compared: `weights` does not say which is which"
        return start(build=lambda _, dtype: _cast(model, dtype), to_torch=None), [], [note]
    state_dict = _state_dict(twin, "float64")
    try:
        _, table = weight_table(model, weights, state_dict)
    except (TypeError, ValueError) as error:
        raise type(error)(f"weights: {error}") from None

    def build(twin: torch.nn.Module, dtype: str) -> nnx.Module:
        return from_torch(_cast(model, dtype), _state_dict(twin, dtype), table)

    back = to_torch(build(twin, "float64"), table)
    faults = [
        f"weights: {key} comes back changed: the JAX module cannot hold it"
        for row in table
        if row.exact
        for key in row.keys
        if not np.array_equal(back[key], state_dict[key], equal_nan=True)
    ]
    gradients = partial(gradients_to_torch, layout=table)
    return start(build=build, to_torch=gradients, table=table), faults, []


def _of_loader(
    start: Start, twin: torch.nn.Module, model: Callable[..., Any], loader: Any, call: Any
) -> tuple[Problem, list[str], list[str]]:
    """A function with a loader: JAX differentiates through it, if it can be traced."""
    if not callable(loader) or call is not None:
        raise TypeError(
            "model: a function of weights and inputs needs a loader as `weights`, and no `call`"
        )
    owners = _owners(twin)
    reads = _Reads(_state_dict(twin, "float32"))
    loaded = loader(reads)
    if loaded is not reads:
        checked_loaded(loaded)
    unread = () if loaded is reads else reads.unread
    read = {owners[key] for key in owners if key not in unread}
    faults = [
        f"weights: the loader does not read {key}" for key in unread if owners[key] not in read
    ]
    try:
        jax.eval_shape(loader, dict(reads))
    except Exception:  # whatever NumPy or torch say of what JAX traces
        note = "weight gradients are not compared: the loader is not in JAX (np where jnp could be)"

        def build(twin: torch.nn.Module, dtype: str) -> Any:
            return _cast(checked_loaded(loader(_state_dict(twin, dtype))), dtype)

        return start(build=build, call=model, to_torch=None), faults, [note]

    def build_owned(twin: torch.nn.Module, dtype: str) -> dict[str, jax.Array]:
        arrays = _state_dict(twin, dtype)
        return {key: jnp.asarray(arrays[key]) for key in dict.fromkeys(owners.values())}

    def of_all(owned: dict[str, Any]) -> dict[str, Any]:
        return {key: owned[owner] for key, owner in owners.items()}

    problem = start(
        build=build_owned,
        call=lambda owned, *inputs: model(loader(of_all(owned)), *inputs),
        to_torch=lambda gradient: jax.tree.map(np.asarray, of_all(gradient)),
    )
    return problem, faults, []


def checked_loaded(weights: Any) -> Any:
    """What a loader returns: an `nnx.Module`, or a tree of arrays."""
    return (
        weights
        if isinstance(weights, nnx.Module)
        else checked_arrays("weights(state_dict)", weights)
    )


def _owners(twin: torch.nn.Module) -> dict[str, str]:
    """The key of each weight, or the first of the keys that share it."""
    first: dict[int, str] = {}
    return {
        key: first.setdefault(id(weight), key)
        for key, weight in twin.state_dict(keep_vars=True).items()
        if weight.is_floating_point()
    }


class _Reads(Mapping[str, np.ndarray]):
    """A state_dict that knows which of its arrays have been read."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.unread = arrays, dict.fromkeys(arrays)

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self.arrays:
            raise KeyError(f"weights: the twin has no {key}, it has {', '.join(self.arrays)}")
        self.unread.pop(key, None)
        return self.arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def _state_dict(twin: torch.nn.Module, dtype: str) -> dict[str, np.ndarray]:
    """The weights of the twin in a dtype; integers, such as BatchNorm's counter, are none."""
    torch_dtype = getattr(torch, dtype)
    return {
        key: as_numpy(value.to(torch_dtype))
        for key, value in twin.state_dict().items()
        if value.is_floating_point()
    }


def _cast(weights: Any, dtype: str) -> Any:
    """A copy of the weights, their floating arrays in a dtype; of a module, for evaluation."""
    graphdef = None
    if isinstance(weights, nnx.Module):
        graphdef, weights = nnx.split(weights)
    weights = jax.tree.map(
        lambda a: jnp.array(a, dtype) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a,
        weights,
    )
    if graphdef is None:
        return weights
    model = nnx.merge(graphdef, weights, copy=True)
    return nnx.view(model, deterministic=True, use_running_average=True, raise_if_not_found=False)
