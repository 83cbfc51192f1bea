"""Errors for unknown arguments, which suggest the name that the function uses."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

OUR_NAMES: dict[str, tuple[str, ...]] = {
    "input_size": ("in_features", "features"),
    "input_dim": ("in_features", "features"),
    "embed_dim": ("features", "in_features"),
    "d_model": ("features", "in_features"),
    "in_channels": ("features", "in_features"),
    "in_features": ("features",),
    "num_features": ("features", "in_features"),
    "num_channels": ("features",),
    "normalized_shape": ("features",),
    "hidden_size": ("hidden_features", "features"),
    "hidden_dim": ("hidden_features", "mlp_features"),
    "features": ("hidden_features", "in_features"),
    "out_features": ("hidden_features",),
    "units": ("hidden_features",),
    "intermediate_size": ("mlp_features", "hidden_features"),
    "proj_size": ("proj_features",),
    "n_layers": ("num_layers",),
    "n_layer": ("num_layers",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "n_head": ("num_heads",),
    "bias": ("use_bias",),
    "dropout": ("dropout_rate",),
    "dropout_prob": ("dropout_rate",),
    "batch_first": ("time_major",),
    "activation": ("nonlinearity",),
    "activation_fn": ("nonlinearity", "activation"),
    "eps": ("epsilon",),
    "max_len": ("max_length", "context_length"),
    "seq_len": ("max_length", "context_length"),
    "l_max": ("max_length",),
    "block_size": ("context_length", "max_length"),
    "kernel_initializer": ("kernel_init",),
    "recurrent_initializer": ("recurrent_kernel_init",),
    "bias_initializer": ("bias_init",),
    "rng": ("rngs",),
    "key": ("rngs",),
    "seed": ("rngs",),
    "input": ("x", "tokens"),
    "inputs": ("x", "tokens"),
    "input_ids": ("tokens", "prompt"),
    "hx": ("state",),
    "h_0": ("state",),
    "carry": ("state",),
    "hidden": ("state",),
    "initial_carry": ("state",),
    "initial_state": ("state",),
    "seq_lengths": ("lengths",),
    "sequence_length": ("lengths",),
    "mask": ("lengths",),
    "attention_mask": ("lengths",),
    "done": ("reset",),
    "first": ("reset",),
    "is_first": ("reset",),
    "max_new_tokens": ("num_tokens",),
}
"""Argument names of PyTorch, Flax, Keras and transformers, and the likeliest names here."""

NOTES = {
    "batch_first": "x is (batch, time, features) unless time_major=True",
    "time_major": "only RNN, LSTM and GRU have it: swap the axes of x, as jnp.swapaxes(x, 0, 1)",
    "done": "reset is True at the first step of an episode, which is the step after a done",
    "mask": "lengths (batch,) says how many steps of each row are real",
    "attention_mask": "lengths (batch,) says how many steps of each row are real",
}
"""Hints for arguments whose value also has a different meaning here."""


def suggests_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function's error for an unknown argument suggest the one that was meant.

    The arguments are compared with the signature only after a TypeError, so that a valid call, such
    as a step of a small layer, takes no longer.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_unknown(function.__name__, signature, args, kwargs)
            raise

    return call


def refuse_unknown(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises a TypeError if arguments, by position or by name, are not in the signature."""
    known = {k: p.kind for k, p in signature.parameters.items() if k != "self"}
    count = len(args)
    if "self" in signature.parameters:
        method = "" if name in ("__init__", "__call__") else f".{name}"
        name, count = f"{type(args[0]).__name__}{method}", count - 1
    unknown = [k for k in kwargs if k not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in known.values():
        raise TypeError(f"{name}: " + "; ".join(_answer(k, [*known]) for k in unknown)) from None
    positional = [k for k, kind in known.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if count > len(positional) and inspect.Parameter.VAR_POSITIONAL not in known.values():
        others = [k for k in known if k not in positional]
        raise TypeError(
            f"{name}: expected at most {len(positional)} positional arguments "
            f"({', '.join(positional)}), got {count}: give the others by name "
            f"({', '.join(others) or 'there are none'})"
        ) from None


def _answer(name: str, known: list[str]) -> str:
    ours = [ours for ours in OUR_NAMES.get(name, ()) if ours in known]
    if name in NOTES and (ours or name not in OUR_NAMES):
        return f"{name}: no such argument; {NOTES[name]}"
    ours = ours or difflib.get_close_matches(name, known)
    if ours:
        return f"{name}: no such argument; did you mean {ours[0]}?"
    return f"{name}: no such argument; expected one of {', '.join(known)}"
