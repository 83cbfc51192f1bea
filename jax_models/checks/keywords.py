"""Errors for unknown arguments, which suggest the name that the function uses."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SUGGESTIONS: list[tuple[str, tuple[str, ...]]] = [
    # sizes
    ("input_size input_dim", ("in_features", "features")),
    ("in_features embed_dim d_model n_embd in_channels num_features", ("features", "in_features")),
    ("num_channels normalized_shape filters out_channels qkv_features", ("features",)),
    ("hidden_size", ("features", "hidden_features", "state_features")),
    ("d_state ssm_size state_size", ("state_features", "state_size")),
    ("dt_min", ("step_min",)),
    ("dt_max", ("step_max",)),
    ("clip_eigs", ("clip_eigenvalues",)),
    ("conj_sym", ("conjugate_pairs",)),
    ("bidir", ("bidirectional",)),
    ("blocks block_count", ("num_blocks",)),
    ("hidden_dim", ("hidden_features", "mlp_features")),
    ("features", ("hidden_features", "in_features")),
    ("out_features units", ("hidden_features", "features")),
    ("intermediate_size n_inner d_ff ffn_dim dim_feedforward", ("mlp_features", "hidden_features")),
    ("lru_width attention_hidden_size", ("recurrent_features", "hidden_features")),
    ("proj_size", ("proj_features",)),
    ("n_layers n_layer num_hidden_layers depth", ("num_layers",)),
    ("num_attention_heads num_query_heads n_head n_heads", ("num_heads",)),
    ("num_key_value_heads n_kv_heads", ("num_kv_heads",)),
    (
        "head_dim key_dim",
        ("head_features", "head_size", "num_heads: each head has features / num_heads channels"),
    ),
    ("kernel conv_kernel d_conv conv1d_width", ("kernel_size",)),
    ("max_len seq_len n_positions max_position_embeddings", ("max_length", "context_length")),
    ("block_size n_ctx", ("context_length", "max_length")),
    ("l_max", ("max_length",)),
    ("attention_window_size sliding_window window_size", ("window",)),
    ("groups group_size", ("num_groups",)),
    # options
    ("bias", ("use_bias",)),
    (
        "num_layers",
        (
            "cells: cells holds the weights of each layer and direction",
            "kernel_hh: ops.recurrent_stack runs layers one after the other",
            "Stack([layer, layer]) runs one layer after the other",
        ),
    ),
    (
        "bidirectional",
        (
            "num_directions",
            "kernel_hh: ops.recurrent_stack runs both directions",
            "Bidirectional(forward, backward) runs a layer each way",
        ),
    ),
    ("num_directions", ("bidirectional", "kernel_hh: ops.recurrent_stack runs both directions")),
    ("dropout dropout_prob", ("dropout_rate", "block_dropout_rate")),
    ("resid_pdrop hidden_dropout hidden_dropout_prob", ("dropout_rate", "block_dropout_rate")),
    ("attn_pdrop attention_dropout", ("dropout_rate", "block_dropout_rate")),
    ("embd_pdrop", ("embedding_dropout_rate", "dropout_rate")),
    ("recurrent_dropout", ("dropout acts on the inputs of layers, never on the hidden state",)),
    (
        "activation activation_fn activation_function hidden_act hidden_activation nonlinearity",
        ("activation", "nonlinearity", "the activations are fixed"),
    ),
    ("recurrent_activation gate_fn", ("the activations of the gates are fixed",)),
    (
        "eps epsilon layer_norm_eps layer_norm_epsilon rms_norm_eps norm_eps",
        ("epsilon", "ε is fixed; nnx.LayerNorm and nnx.RMSNorm of Flax take epsilon"),
    ),
    (
        "affine elementwise_affine use_scale center scale",
        ("a norm always has its parameters; the norms of Flax can leave them out",),
    ),
    ("axis axis_name reduction_axes feature_axes", ("the features are the last axis of x",)),
    ("use_fast_variance", ("the variance is always computed from the centered values",)),
    ("track_running_stats", ("after norm.eval(), the running statistics are used",)),
    (
        "partial_rotary_factor",
        (
            "rotary_fraction",
            "rotary_features: rotary_features is the number of rotated features of a head",
        ),
    ),
    ("tie_word_embeddings", ("tied_head",)),
    (
        "stride strides padding padding_mode dilation dilation_rate kernel_dilation input_dilation",
        ("kernel_size: the convolution is causal, with stride 1 and no dilation",),
    ),
    ("batch_first", ("time_major: x is (batch, time, features) unless time_major=True",)),
    (
        "time_major",
        ("only RNN, LSTM and GRU have it: swap the axes of x, as jnp.swapaxes(x, 0, 1) does",),
    ),
    ("go_backwards reverse keep_order", ("reverse", "Reversed(layer) runs a layer backward")),
    ("merge_mode", ("the outputs of both directions are concatenated",)),
    ("forward_rnn forward_layer", ("forward",)),
    ("backward_rnn backward_layer", ("backward",)),
    ("residual", ("add x to the y of the layer",)),
    (
        "return_sequences return_state return_carry",
        ("a call returns (y, state), where y has the outputs of all steps",),
    ),
    ("stateful", ("give the state that a call returns to the next call",)),
    ("use_cache decode", ("the state is the cache: give it to the next call, or to step",)),
    ("unroll", ("the loop over time is compiled once, whatever the length",)),
    ("implementation", ("method",)),
    ("use_cudnn", ('an LSTM has method="cudnn"',)),
    ("device device_map map_location", ("sharding", "jax.default_device chooses the device")),
    (
        "dtype param_dtype",
        (
            "param_dtype",
            "vocab_size: pass it to the build of the config",
            "results have the dtypes of the arrays",
        ),
    ),
    ("promote_dtype", ("dtype is that of the computation, param_dtype that of the parameters",)),
    ("torch_dtype", ("param_dtype", "vocab_size: did you mean param_dtype?")),
    ("name parent", ("modules of Flax NNX have no names",)),
    # initialization
    (
        "kernel_init recurrent_kernel_init bias_init",
        (
            "kernel_hh: an operator takes the weights themselves, without initializers",
            "kernel: an operator takes the weights themselves, without initializers",
        ),
    ),
    ("kernel_initializer", ("kernel_init",)),
    ("recurrent_initializer", ("recurrent_kernel_init",)),
    ("bias_initializer", ("bias_init",)),
    ("unit_forget_bias", ("bias_init: bias_init sets the biases of all gates, side by side",)),
    ("carry_init init_key", ("a call without a state starts from init_state(batch_size)",)),
    (
        "kernel_metadata recurrent_kernel_metadata bias_metadata scale_metadata",
        ("nnx.with_partitioning gives metadata to the parameters of an initializer",),
    ),
    (
        "kernel_regularizer recurrent_regularizer bias_regularizer activity_regularizer",
        ("add the penalty to the loss",),
    ),
    (
        "kernel_constraint recurrent_constraint bias_constraint",
        ("change the parameters after the step of the optimizer",),
    ),
    ("rng key seed prng_key", ("rngs", "key")),
    ("rngs", ("key", "a layer keeps the rngs that it was built with")),
    # calls
    ("input inputs sequences input_ids", ("x", "tokens", "x_t", "token", "audio", "prompt")),
    ("x", ("x_t", "tokens", "token", "audio")),
    ("hx h0 h_0 c0 c_0 hidden carry initial_carry initial_state", ("state",)),
    ("state", ("state_dict", "h0")),
    ("seq_lengths sequence_length", ("lengths",)),
    (
        "starts",
        ("lengths: an operator takes padding only at the end of a row; layers have starts",),
    ),
    ("rows", ("lengths: pass rows.lengths instead",)),
    ("time_axis", ("nnx.view(layer, time_axis=…) divides time, in layers that support it",)),
    (
        "mask attention_mask",
        ("lengths: lengths (batch,) says how many steps of each row are real", "mask"),
    ),
    (
        "done is_done terminated truncated",
        ("reset: reset is True at the first step of an episode, which is the step after a done",),
    ),
    ("first is_first", ("reset",)),
    ("training train deterministic", ("layer.train() and layer.eval() switch dropout on and off",)),
    # generation
    ("max_new_tokens", ("num_tokens",)),
    ("max_length", ("num_tokens: num_tokens counts the new tokens, without the prompt",)),
    ("do_sample", ("temperature: temperature=0 takes the likeliest token",)),
    (
        "min_p typical_p num_beams",
        ("temperature: tokens are drawn by temperature, top_k and top_p only",),
    ),
    ("num_return_sequences", ("prompt: repeat the rows of the prompt",)),
    ("eos_token_id stop", ("stop_tokens",)),
    ("pad_token_id", ("stop_tokens: a row that has stopped repeats its stop token",)),
    ("streamer", ("stream yields the tokens one by one",)),
    # loading
    ("strict", ("layer: every key and every parameter is always checked",)),
    ("assign", ("layer: the parameters keep their dtype and sharding",)),
    ("model module", ("layer",)),
    ("weights", ("state_dict", "path")),
    ("pretrained_model_name_or_path model_name_or_path filename", ("path",)),
    ("cache_dir revision", ("path: path is a file or a folder of this machine",)),
]
"""Argument names of other packages, and our arguments for them, the likeliest first.

The names are those of PyTorch, Flax, Keras, Equinox and transformers. A hint after one of our
arguments explains the difference. If we have no such argument, a sentence says what to do instead.
"""


EXAMPLES = {"rngs": " (such as nnx.Rngs(0))"}
"""What the error for a missing argument adds to its name."""


def suggests_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function's error name missing arguments, and for an unknown one suggest another.

    The arguments are compared with the signature only after a TypeError, so that valid calls, such
    as a step of a small layer, are not slowed down.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse_unknown(function.__name__, signature, args, kwargs)
            refuse_missing(function.__name__, signature, args, kwargs)
            raise

    return call


def refuse_unknown(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises a TypeError if positional or keyword arguments do not fit the signature."""
    known = {k: p.kind for k, p in signature.parameters.items() if k != "self"}
    name, count = _shown(name, signature, args), len(args) - ("self" in signature.parameters)
    unknown = [k for k in kwargs if k not in known]
    if unknown and inspect.Parameter.VAR_KEYWORD not in known.values():
        owner = args[0] if "self" in signature.parameters else None
        raise TypeError(
            f"{name}: " + "; ".join(_suggestion(k, [*known], owner) for k in unknown)
        ) from None
    positional = [k for k, kind in known.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if count > len(positional) and inspect.Parameter.VAR_POSITIONAL not in known.values():
        others = [k for k in known if k not in positional]
        raise TypeError(
            f"{name}: expected at most {len(positional)} positional arguments "
            f"({', '.join(positional)}), got {count}: give the others by name "
            f"({', '.join(others) or 'there are none'})"
        ) from None


def refuse_missing(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raises a TypeError that names the arguments that have no default and are missing.

    Python's own error names them only if they are in the function's own signature, which does not
    list the options of a TypedDict, such as `rngs`.
    """
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    given = {*[*signature.parameters][: len(args)], *kwargs}
    missing = [
        f"{k}{EXAMPLES.get(k, '')}"
        for k, p in signature.parameters.items()
        if p.default is p.empty and p.kind not in variadic and k not in given
    ]
    if missing:
        name = _shown(name, signature, args)
        raise TypeError(f"{name}: missing {', '.join(missing)}") from None


def _shown(name: str, signature: inspect.Signature, args: tuple) -> str:
    """The name of a function in errors, or of its class if it is a constructor."""
    if "self" not in signature.parameters:
        return name
    method = "" if name in ("__init__", "__call__") else f".{name}"
    return f"{type(args[0]).__name__}{method}"


_SUGGESTIONS = {name: answers for names, answers in SUGGESTIONS for name in names.split()}


OTHER_METHODS = {"__init__": "pass it to the constructor", "__call__": "pass it to the call"}
"""What to do with an argument that another method of the same layer has."""


def _suggestion(name: str, known: list[str], owner: Any) -> str:
    """What to do instead of passing an argument that a function, or a method of `owner`, lacks."""
    for method, advice in OTHER_METHODS.items():
        if name in inspect.signature(getattr(owner, method, lambda: None)).parameters:
            return f"{name}: no such argument; {advice}"
    similar = difflib.get_close_matches(name, known, 1, cutoff=0.75) or [
        ours for ours in known if ours.startswith(f"{name}_")
    ]
    for answer in (*_SUGGESTIONS.get(name, ()), *similar):
        ours, _, hint = answer.partition(": ")
        if ours in known:
            return f"{name}: no such argument; {hint or f'did you mean {ours}?'}"
        if " " in ours:
            return f"{name}: not offered: {answer}"
    return f"{name}: no such argument; expected one of {', '.join(known)}"
