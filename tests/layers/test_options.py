"""Every constructor with one wrong option at a time raises a one-line error that names it."""

import inspect
import pydoc
import re
from functools import partial
from typing import Annotated, Unpack, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Shaped

import jax_models
import jax_models.ops
from jax_models import (
    GRU,
    LSTM,
    Hawk,
    LanguageModel,
    LanguageModelConfig,
    LayerNorm,
    RNNLanguageModelConfig,
    from_torch,
    generate,
)
from jax_models.checks.arguments import signature
from jax_models.models.silero_vad import SileroVADConfig
from jax_models.options import FloatingDtype, Index

INTEGERS = (int, int | None)
COUNTS = {
    "num_heads": 2,
    "num_blocks": 2,
    "num_groups": 2,
    "num_key_heads": 2,
    "num_value_heads": 2,
}
"""Values of required arguments that are not widths."""


def sizes_of(constructor) -> dict[str, int]:
    """A value for each argument that has no default."""
    parameters = inspect.signature(constructor).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.annotation in INTEGERS]
    return {name: COUNTS.get(name, 64) for name in required}


PUBLIC = {name: getattr(jax_models, name) for name in jax_models.__all__}
CLASSES = {name: value for name, value in PUBLIC.items() if isinstance(value, type)}
CONFIGS = [name for name, value in CLASSES.items() if issubclass(value, LanguageModelConfig)]
MODELS = {name for name, value in CLASSES.items() if issubclass(value, LanguageModel)}
SIZES = {
    name: sizes_of(value.__init__)
    for name, value in CLASSES.items()
    if name not in MODELS and "rngs" in inspect.signature(value.__init__).parameters
}
"""The constructors that create weights, except those of language models."""
NAN, KEY, X = float("nan"), jax.random.key(0), jnp.ones((2, 3, 64))
WRONG = {
    int: (True, 2.5, "3", -1, 2**28, NAN, None, jnp.ones(2)),
    Index: (True, 2.5, "3", -1, NAN, None),
    int | None: (True, 2.5, "3", -1, NAN),
    float: (NAN, float("inf"), "1", True, None, 10**400),
    bool: (1, "no", None),
    nnx.Rngs: (None, KEY, 0, nnx.Rngs(dropout=0)),
    FloatingDtype: ("foo", int, "complex64", "float8_e4m3fn", None),
    FloatingDtype | None: ("foo", int, "complex64", "float8_e4m3fn"),
    inspect.Parameter.empty: (),
}
ONE_LINE = r"{}: expected .+, got .+"


def build(name: str, **options):
    given = {} if name in CONFIGS else {**SIZES[name], "rngs": nnx.Rngs(0)}
    return PUBLIC[name](**given | options)


def wrong_values(annotation):
    return WRONG.get(annotation, ("foo", np.array(["a", "b"])))  # for a Literal and other types


@pytest.mark.parametrize("name", [*SIZES, *CONFIGS])
def test_a_constructor_refuses(name):
    for option, parameter in inspect.signature(PUBLIC[name]).parameters.items():
        annotation = parameter.annotation
        if option in ("dtype", "param_dtype"):
            annotation = FloatingDtype if option == "param_dtype" else FloatingDtype | None
        for value in wrong_values(annotation):
            with pytest.raises((TypeError, ValueError)) as error:
                build(name, **{option: value})
            assert re.fullmatch(ONE_LINE.format(option), str(error.value))


def required_arguments(function) -> list[str]:
    """The arguments without a default, with those of a TypedDict in the place of `**options`."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


CALLED = PUBLIC | {f"ops.{name}": getattr(jax_models.ops, name) for name in jax_models.ops.__all__}
REQUIRED = {name: names for name, value in CALLED.items() if (names := required_arguments(value))}


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_argument_is_named_and_for_a_misspelled_one_another_is_suggested(name):
    """The other arguments have wrong values, because those that are missing are named first."""
    call, parameters = CALLED[name], inspect.signature(CALLED[name]).parameters.values()
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)  # to another function
    if inspect.isfunction(call) and len(parameters) > 1 and not passes_on:
        with pytest.raises(TypeError, match=rf"^{call.__name__}: windw: no such argument; "):
            call(windw=3)
    for missing in REQUIRED[name]:
        others = {other: None for other in REQUIRED[name] if other != missing}
        with pytest.raises(TypeError, match=rf".* missing .*\b{missing}\b.*") as error:
            call(**others)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", [*SIZES, *CONFIGS, "Stack", "Bidirectional", "Reversed"])
def test_help_shows_the_signature(name):
    shown, of_init = map(inspect.signature, (PUBLIC[name], PUBLIC[name].__init__))
    assert [*shown.parameters] == [*of_init.parameters][1:]
    lines = pydoc.render_doc(PUBLIC[name], renderer=pydoc.plaintext).splitlines()
    assert lines[3].startswith(f" |  {name}(")
    assert "*args" not in lines[3]
    assert " at 0x" not in f"{shown}{of_init}"
    if name == "LSTM":
        arguments = "x state lengths starts reset"
        assert " ".join(inspect.signature(build(name)).parameters) == arguments


MODEL = RNNLanguageModelConfig()
OF_OTHERS = [
    ("LSTM: input_size: .* in_features", lambda **k: LSTM(input_size=32, hidden_size=64, **k)),
    ("LSTM: batch_first: .* time_major=True", lambda **k: LSTM(32, 64, batch_first=True, **k)),
    ("Hawk: kernel: .* kernel_size", lambda **k: Hawk(32, kernel=4, **k)),
    ("nothing: .* one of in_features, hidden", lambda **k: LSTM(32, 64, nothing=1, **k)),
    (r"at most 2 positional .* by name \(num_layers, ", lambda **k: LSTM(32, 64, 2, **k)),
    ("RNNLanguageModel: rng: .* rngs", lambda rngs: MODEL.build(rng=rngs)),
    ("Config: expected at most .*, got 9", lambda **k: RNNLanguageModelConfig(*range(9))),
    (r"^GRU: missing hidden_features, rngs \(such as nnx.Rngs\(0\)\)$", lambda **k: GRU(3)),
    ("^LSTM: hx: .* state", lambda **k: build("LSTM")(X, hx=None)),
    ("^LSTM: .* got 3: .*lengths", lambda **k: build("LSTM")(X, None, None)),
    ("^LSTM.step: done: .*; reset is True at", lambda **k: build("LSTM").step(0, 0, done=0)),
    ("^SileroVADConfig: rate: .* sample_rate", lambda **k: SileroVADConfig(rate=8000)),
    ("^LSTM: method: .* constructor$", lambda **k: build("LSTM")(X, method="xla")),
    ("^LSTM.step: dtype: .* constructor$", lambda **k: build("LSTM").step(0, 0, dtype=0)),
    ("^LSTM.step: lengths: .* to the call$", lambda **k: build("LSTM").step(0, 0, lengths=0)),
    ("^GRU: starts: .* to the call$", lambda **k: GRU(3, 4, starts=0, **k)),
    ("^LSTM: time_axis: .* nnx.view", lambda **k: build("LSTM")(X, time_axis="t")),
    ("^LSTM: rows: .* rows.lengths", lambda **k: build("LSTM")(X, rows=0)),
    ("^LSTM: implementation: .* method", lambda **k: LSTM(3, 4, implementation="xla", **k)),
    ("^LSTM: num_directions: .* bidirectional", lambda **k: LSTM(3, 4, num_directions=2, **k)),
    ("^RNNLanguageModelConfig: dtype: .* build", lambda **k: RNNLanguageModelConfig(dtype=int)),
    ("dropout: not offered", lambda **k: LSTM(3, 4, recurrent_dropout=0.1, **k)),
    ("carry_init: not offered: .*init_s", lambda **k: GRU(3, 4, carry_init=None, **k)),
    ("the activations are fixed$", lambda **k: GRU(3, 4, nonlinearity="relu", **k)),
    ("LayerNorm: eps: not offered: ε is fixed;", lambda **k: LayerNorm(3, eps=1e-5, **k)),
    ("generate: min_p: .*; tokens are", lambda **k: generate(None, None, 3, key=0, min_p=0.9)),
    ("from_torch: strict: .*; every key", lambda **k: from_torch(None, {}, strict=False)),
]


@pytest.mark.parametrize(("message", "call"), OF_OTHERS)
def test_an_argument_of_another_package_is_answered_with_ours(message, call):
    with pytest.raises(TypeError, match=message):
        call(rngs=nnx.Rngs(0))


WRAPPERS = {
    "Stack": lambda: jax_models.Stack([build("Hawk"), build("Hawk")]),
    "Bidirectional": lambda: jax_models.Bidirectional(build("Hawk"), build("Hawk")),
    "Reversed": lambda: jax_models.Reversed(build("Hawk")),
}
"""Layers that are made of other layers."""


@pytest.mark.parametrize("name", [*SIZES, *WRAPPERS, "RNNLanguageModelConfig"])
def test_a_call_without_arguments_names_the_class_of_the_layer_and_what_is_missing(name):
    def call_without_arguments():
        layer = WRAPPERS[name]() if name in WRAPPERS else build(name)
        layer = layer.build(rngs=nnx.Rngs(0)) if name in CONFIGS else layer
        for method in {"__call__", "step", "init_state", "logits"} & {*dir(layer)}:
            shown = type(layer).__name__ + f".{method}" * (method != "__call__")
            names = ", ".join(required_arguments(getattr(layer, method)))
            with pytest.raises(TypeError, match=rf"^{shown}: missing {names}$"):
                getattr(layer, method)()

    jax.eval_shape(call_without_arguments)


def typed_options(function) -> list[type]:
    """The TypedDicts that a function or a class takes as keyword arguments."""
    function = inspect.unwrap(function.__init__ if isinstance(function, type) else function)
    annotations = [
        parameter.annotation
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
    ]
    return [get_args(each)[0] for each in annotations if get_origin(each) is Unpack]


DOCUMENTED = {name: inspect.getdoc(value) or "" for name, value in CALLED.items()}


@pytest.mark.parametrize("name", [name for name, text in DOCUMENTED.items() if "Args:" in text])
def test_the_arguments_of_a_signature_are_under_args(name):
    """Options are in the TypedDict that the docstring names."""
    _, under_args = DOCUMENTED[name].split("Args:", 1)
    entries = re.findall(r"^ +(\*{0,2}[\w, *]+?):", under_args, re.MULTILINE)
    described = {entry.strip(" *") for found in entries for entry in found.split(",")}
    options = {option for kind in typed_options(CALLED[name]) for option in get_type_hints(kind)}
    assert {*signature(CALLED[name]).parameters} <= described | options


@pytest.mark.parametrize("name", [name for name, value in CALLED.items() if typed_options(value)])
def test_a_list_of_options_is_whole(name):
    """The options in the sentence that names their TypedDict are all that it has, if any."""
    for sentence in re.split(r"\.\s", DOCUMENTED[name]):
        for kind in typed_options(CALLED[name]):
            options = {*get_type_hints(kind)}
            if f"`{kind.__name__}`" in sentence:
                assert {*re.findall(r"`(\w+)`", sentence)} & options in (set(), options)


REFUSED = [
    *(
        ("length: expected", lambda name=name, n=n: build(name)(n))
        for name in SIZES
        if name.endswith("Filter")
        for n in (-1, "a", 2.0)
    ),
    *(
        ("^x: expected", lambda name=name, x=x: build(name)(x))
        for name in SIZES
        if name.endswith(("Norm", "MLP")) or name == "Experts"
        for x in (jnp.ones((4, 65)), jnp.ones((4, 1)), jnp.ones((4, 64), jnp.int32))
    ),
    *(
        ("batch_size: expected", lambda name=name, n=n: build(name).init_state(n))
        for name in ("LSTM", "SelfAttentionBlock")
        for n in (-1, 2.0, True)
    ),
    ("expected at most 2, got 3", partial(build, "Attention", head_features=3)),
    (
        "expected at most 2, got 3",
        partial(build, "Attention", head_features=3, rotary_features=3),
    ),
    ("batch_size: expected", lambda: MODEL.build(rngs=nnx.Rngs(0)).init_state(-1)),
    ("rngs: expected nnx.Rngs", lambda: MODEL.build(rngs=KEY)),
    ("dtype: expected one of float16", lambda: MODEL.build(rngs=nnx.Rngs(0), dtype="foo")),
    ("a subclass builds", lambda: LanguageModelConfig(5).build(rngs=nnx.Rngs(0))),
    *(
        (f"^{next(iter(options))}: expected", partial(build, name, **options))
        for name, options in (
            ("Attention", {"num_kv_heads": 3}),
            ("Attention", {"zero_centered_norm": True}),
            ("Attention", {"epsilon": 1e-5}),
            ("Attention", {"epsilon": 0.0, "qk_norm": "all"}),
            ("Attention", {"rope_theta": 1e4, "rotary_features": 0}),
            ("Attention", {"max_length": 9, "window": 3}),
            ("Attention", {"qk_norm": "both"}),
            ("Attention", {"bias_init": nnx.initializers.ones}),
            ("AuthenticHyenaBlock", {"embed_features": 8}),
            ("AuthenticHyenaBlock", {"num_filter_layers": 1}),
            ("SelfAttentionBlock", {"num_heads": 3}),
            ("HyenaDNAMixer", {"order": 1}),
            ("HyenaDNAFilter", {"embed_features": 4}),
            ("HyenaDNAFilter", {"num_filter_layers": 1}),
            ("StripedHyenaMixer", {"num_heads": 5}),
            ("StripedHyenaBlock", {"activation": "relu"}),
            ("RWKV6Block", {"head_size": 5}),
            ("RWKV7Block", {"head_size": 5}),
            ("RWKVBlock", {"layer_index": 3, "num_layers": 3}),
            ("GatedDeltaNet", {"num_key_heads": 4}),
            ("GatedDeltaNet", {"epsilon": 0.0}),
            ("KimiDeltaAttention", {"min_log_decay": 0.0}),
            ("LightningAttention", {"layer_index": 4}),
            ("MLSTM", {"num_heads": 5}),
            ("Experts", {"num_groups": 5}),
            ("Experts", {"num_groups": 64}),
            ("Experts", {"groups_per_token": 2}),
            ("Experts", {"experts_per_token": 9, "num_groups": 16, "groups_per_token": 2}),
            ("Experts", {"shared_gate": True}),
            ("Experts", {"use_bias": True}),
            ("ShortConvolution", {"bias_init": nnx.initializers.zeros}),
            ("RGLRU", {"epsilon": 1e-6, "parameterization": "direct"}),
            ("RGLRU", {"parameterization": "direct", "num_blocks": 2}),
            ("GriffinBlock", {"out_variance": 0.5, "kernel_init": nnx.initializers.zeros}),
        )
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_a_value_is_refused(message, call):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call()


@pytest.mark.parametrize("name", SIZES)
def test_a_layer_has_sizes_of_python_and_refuses_to_run_if_it_is_abstract(name):
    """While it is built, its methods suggest an argument. NumPy's sizes become Python's."""

    def call_with_a_misspelled_argument():
        layer = build(name, **{option: np.int64(size) for option, size in SIZES[name].items()})
        for method in {"__call__", "step", "init_state"} & {*dir(layer)}:
            message = rf"^{name}(\.{method})?: windw: no such argument; "
            with pytest.raises(TypeError, match=message):
                getattr(layer, method)(windw=3)
        return layer

    layer = nnx.eval_shape(call_with_a_misspelled_argument)
    assert not [key for key, value in vars(layer).items() if isinstance(value, np.integer)]
    size = getattr(layer, "in_features", 512 if name == "SileroVAD" else 64)
    x = 4 if name.endswith("Filter") else jnp.ones((4, 4, size))
    message = rf"^{name}: expected parameters with values, got the shapes that nnx.eval_shape makes"
    with pytest.raises(ValueError, match=message):
        layer(jnp.ones((4, size)) if name == "SileroVAD" else x)


def test_a_layer_of_ones_own_may_have_any_annotations():
    class Layer(jax_models.SequenceLayer):
        def __init__(
            self,
            features: int,
            padding: int | tuple[int, int] | None,
            matrix: Shaped[jax.Array, "a b"],
            rate: Annotated[float, (0, 1)],
        ):
            super().__init__(features)
            self.padding = padding

    for padding in (1, (1, 2), None):
        layer = Layer(np.int64(3), padding, np.ones((2, 2), int), 0.5)
        assert (layer.padding, type(layer.in_features)) == (padding, int)
    assert type(RNNLanguageModelConfig(vocab_size=np.int64(7)).vocab_size) is int
    with pytest.raises(ValueError, match="rate: expected a finite number, got 'no'"):
        Layer(3, 1, jnp.ones((2, 2)), "no")


def test_annotations_may_be_strings():
    source = """
from __future__ import annotations
class Layer(SequenceLayer):
    def __init__(self, features: int, other: {} = None):
        super().__init__(features)
"""
    for other in ("int | None", "Unknown"):
        exec(source.format(other), names := {"SequenceLayer": jax_models.SequenceLayer})
        assert names["Layer"](3).in_features == 3
    exec(source.format("int | None"), names)
    with pytest.raises(ValueError, match="other: expected a positive integer, got 0"):
        names["Layer"](3, 0)
