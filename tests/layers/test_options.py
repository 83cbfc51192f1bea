"""Every constructor with one wrong option at a time: an error of one line that says which."""

import inspect
import pydoc
import re
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Float, Shaped

import jax_models
import jax_models.ops
from jax_models import (
    GRU,
    LSTM,
    RNN,
    BatchNorm,
    Hawk,
    HawkLanguageModelConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerNorm,
    MinGRU,
    RMSNorm,
    RNNLanguageModelConfig,
    RWKVLanguageModelConfig,
    from_torch,
    generate,
)
from jax_models.models.silero_vad import SileroVADConfig
from jax_models.options import FloatingDtype, Index
from train.optimizer import OptimizerConfig

INTEGERS = (int, int | None)
COUNTS = {"num_heads": 2, "num_blocks": 2, "num_groups": 2}
"""Values of required arguments that are no widths."""


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
"""The constructors that make weights, apart from those of language models."""
NAN, KEY = float("nan"), jax.random.key(0)
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
    return PUBLIC[name](**{**SIZES[name], "rngs": nnx.Rngs(0), **options})


def wrong_values(annotation):
    return WRONG.get(annotation, ("foo", np.array(["a", "b"])))  # of a Literal, or of no use


@pytest.mark.parametrize("name", SIZES)
def test_a_constructor_refuses(name):
    parameters = inspect.signature(getattr(jax_models, name).__init__).parameters
    for option, parameter in [*parameters.items()][1:]:
        annotation = parameter.annotation
        if option in ("dtype", "param_dtype"):
            annotation = FloatingDtype if option == "param_dtype" else FloatingDtype | None
        for value in wrong_values(annotation):
            with pytest.raises((TypeError, ValueError)) as error:
                build(name, **{option: value})
            assert re.fullmatch(ONE_LINE.format(option), str(error.value))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_refuses(name):
    for option, parameter in inspect.signature(getattr(jax_models, name)).parameters.items():
        for value in wrong_values(parameter.annotation):
            with pytest.raises(ValueError, match=ONE_LINE.format(option)):
                getattr(jax_models, name)(**{option: value})


@pytest.mark.parametrize("name", [*SIZES, *CONFIGS, "Stack", "Bidirectional", "Reversed"])
def test_help_shows_the_signature(name):
    shown = getattr(jax_models, name)
    assert [*inspect.signature(shown).parameters] == [
        *inspect.signature(shown.__init__).parameters
    ][1:]
    lines = pydoc.render_doc(shown, renderer=pydoc.plaintext).splitlines()
    assert lines[3].startswith(f" |  {name}(") and "*args" not in lines[3]  # noqa: PT018
    assert " at 0x" not in str(inspect.signature(shown)) + str(inspect.signature(shown.__init__))


def test_a_layer_that_is_called_has_the_signature_of_the_call():
    assert [*inspect.signature(build("LSTM")).parameters] == ["x", "state", "lengths", "reset"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rngs: LSTM(input_size=32, hidden_size=64, rngs=rngs),
            r"LSTM: input_size: no such argument; did you mean in_features\?; hidden_size: no such "
            r"argument; did you mean hidden_features\?",
        ),
        (
            lambda rngs: LSTM(32, 64, batch_first=True, rngs=rngs),
            r"LSTM: batch_first: .*; x is \(batch, time, features\) unless time_major=True",
        ),
        (lambda rngs: LSTM(32, 64, dropout=0.1, rngs=rngs), "LSTM: dropout: .* dropout_rate"),
        (lambda rngs: RNN(32, 64, non_linearity="relu", rngs=rngs), "RNN: non_lin.* nonlinearity"),
        (lambda rngs: GRU(32, features=64, rngs=rngs), "GRU: features: .* hidden_features"),
        (lambda rngs: MinGRU(32, 64, bias=False, rngs=rngs), "MinGRU: bias: .* use_bias"),
        (lambda rngs: Hawk(32, kernel=4, rngs=rngs), "Hawk: kernel: .* kernel_size"),
        (lambda rngs: LayerNorm(d_model=32, rngs=rngs), "LayerNorm: d_model: .* features"),
        (lambda rngs: LSTM(32, 64, nothing=1, rngs=rngs), "nothing: .* one of in_features, hidden"),
        (
            lambda rngs: LSTM(32, 64, 2, rngs=rngs),
            r"LSTM: expected at most 2 positional arguments \(in_features, hidden_features\), "
            r"got 3: give the others by name \(num_layers, ",
        ),
        (lambda rngs: RNNLanguageModelConfig().build(rng=rngs), "RNNLanguageModel: rng: .* rngs"),
        (lambda rngs: build("LSTM").init_state(batch=3), r"LSTM.init_state: batch: no such"),
        (lambda rngs: jax_models.ops.gelu(inputs=3), r"gelu: inputs: .*; did you mean x\?"),
        (lambda rngs: HawkLanguageModelConfig(hidden_size=64), "Config: hidden_size: .* features"),
        (
            lambda rngs: RNNLanguageModelConfig(*range(9)),
            "Config: expected at most .*, got 9",
        ),
        (lambda rngs: build("LSTM")(jnp.ones((2, 3, 5)), hx=None), "^LSTM: hx: .* state"),
        (lambda rngs: build("LSTM")(jnp.ones((2, 3, 5)), None, None), "^LSTM: .* got 3: .*lengths"),
        (lambda rngs: build("LSTM").step(0, 0, done=0), "^LSTM.step: done: .*; reset is True at"),
        (lambda rngs: build("RMSNorm")(inputs=0), "^RMSNorm: inputs: .* x"),
        (lambda rngs: OptimizerConfig(beta=0.9), "^OptimizerConfig: beta: .* betas"),
        (lambda rngs: SileroVADConfig(rate=8000), "^SileroVADConfig: rate: .* sample_rate"),
        (
            lambda rngs: LSTM(3, 4, return_sequences=True, rngs=rngs),
            r"LSTM: return_sequences: not offered: a call returns \(y, state\), where y has the",
        ),
        (
            lambda rngs: LSTM(3, 4, recurrent_dropout=0.1, rngs=rngs),
            "dropout: not offered: drop",
        ),
        (
            lambda rngs: GRU(3, 4, carry_init=None, rngs=rngs),
            "carry_init: not offered: .*init_s",
        ),
        (lambda rngs: GRU(3, 4, nonlinearity="relu", rngs=rngs), "the activations are fixed$"),
        (lambda rngs: Hawk(3, bidirectional=True, rngs=rngs), r"not offered: Bidirectional\(forw"),
        (
            lambda rngs: RMSNorm(3, eps=1e-5, rngs=rngs),
            "RMSNorm: eps: not offered: ε is fixed;",
        ),
        (lambda rngs: BatchNorm(3, eps=1e-5, rngs=rngs), r"BatchNorm: eps: .* epsilon\?"),
        (lambda rngs: RWKVLanguageModelConfig(hidden_size=8), r"hidden_size: .* mean features\?"),
        (lambda rngs: HawkLanguageModelConfig(n_embd=8), r"n_embd: .* mean features\?"),
        (lambda rngs: build("LSTM")(jnp.ones((2, 3, 5)), h0=None), r"LSTM: h0: .* mean state\?"),
        (lambda rngs: build("LSTM").step(inputs=0, state=0), r"step: inputs: .* mean x_t\?"),
        (lambda rngs: generate(None, None, 3, key=0, top_p=0.9), "generate: top_p: .*; tokens are"),
        (lambda rngs: from_torch(None, {}, strict=False), "from_torch: strict: .*; every key"),
    ],
)
def test_an_argument_of_another_package_is_answered_with_ours(call, message):
    with pytest.raises(TypeError, match=message):
        call(nnx.Rngs(0))


@pytest.mark.parametrize(
    "public",
    [
        value
        for module in (jax_models, jax_models.ops)
        for name, value in vars(module).items()
        if name[0] != "_"
        and inspect.isfunction(value)
        and len(inspect.signature(value).parameters) > 1
    ],
)
def test_a_function_suggests_an_argument(public):
    kinds = {p.kind for p in inspect.signature(public).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:  # they go on to another function
        with pytest.raises(TypeError, match=rf"^{public.__name__}: windw: no such argument; "):
            public(windw=3)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("method", ["__call__", "step", "init_state"])
def test_a_method_suggests_an_argument(name, method):
    layer = build(name)
    if hasattr(layer, method):
        with pytest.raises(TypeError, match=rf"^{name}(\.{method})?: windw: no such argument; "):
            getattr(layer, method)(windw=3)


@pytest.mark.parametrize("name", SIZES)
def test_a_layer_that_is_abstract_says_so(name):
    layer = nnx.eval_shape(partial(build, name))
    size = getattr(layer, "in_features", 512 if name == "SileroVAD" else 64)
    x = 4 if name.endswith("Filter") else jnp.ones((4, 4, size))
    message = rf"^{name}: expected parameters with values, got the shapes that nnx.eval_shape makes"
    with pytest.raises(ValueError, match=message):
        layer(jnp.ones((4, size)) if name == "SileroVAD" else x)


ROWS = [name for name in SIZES if name.endswith("Norm") or name == "GatedMLP"]


@pytest.mark.parametrize("name", ROWS)
def test_a_layer_of_rows_refuses_other_arrays(name):
    size = 64
    for x, message in (
        (jnp.ones((4, size + 1)), rf"^x: expected shape \(…, {size}\), got \(4, {size + 1}\)"),
        (jnp.ones((4, 1)), rf"^x: expected shape \(…, {size}\), got \(4, 1\)"),
        (jnp.ones((4, size), jnp.int32), r"^x: expected a floating dtype, got int32"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            build(name)(x)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_numpys(name):
    sizes = {option: np.int64(size) for option, size in SIZES[name].items()}
    layer = nnx.eval_shape(partial(build, name, **sizes))
    assert not [key for key, value in vars(layer).items() if isinstance(value, np.integer)]


def test_a_config_keeps_numpys_sizes_as_int():
    config = jax_models.RNNLanguageModelConfig(vocab_size=np.int64(7), dropout_rate=np.float32(0))
    assert (type(config.vocab_size), type(config.dropout_rate)) == (int, float)


@pytest.mark.parametrize("batch_size", [-1, 2.0, True])
def test_a_state_has_some_rows(batch_size):
    model = jax_models.RNNLanguageModelConfig().build(rngs=nnx.Rngs(0))
    for layer in (build("LSTM"), build("SelfAttentionBlock"), model):
        with pytest.raises(ValueError, match="batch_size: expected "):
            layer.init_state(batch_size)


def test_a_layer_of_ones_own_may_have_any_annotations():
    class Layer(jax_models.SequenceLayer):
        def __init__(
            self,
            features: int,
            padding: int | tuple[int, int] | None,
            matrix: Shaped[jax.Array, "a b"],
            anything: Float[jax.Array, "..."],
            rate: Annotated[float, (0, 1)],
            *,
            rngs: nnx.Rngs,
        ):
            super().__init__(features)
            self.padding = padding

    arrays = np.ones((2, 2), int), jnp.ones((2, 2))
    for padding in (1, (1, 2), None):
        layer = Layer(3, padding, *arrays, 0.5, rngs=nnx.Rngs(0))
        assert layer.padding == padding
    with pytest.raises(ValueError, match="rate: expected a finite number, got 'no'"):
        Layer(3, 1, *arrays, "no", rngs=nnx.Rngs(0))


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


@pytest.mark.parametrize("name", ["HyenaFilter", "AuthenticHyenaFilter", "HyenaDNAFilter"])
@pytest.mark.parametrize("length", [-1, "a", 2.0])
def test_a_filter_has_a_number_of_taps(name, length):
    with pytest.raises(ValueError, match=r"length: expected .*, got .*"):
        build(name)(length)


def test_the_config_of_no_model_builds_none():
    with pytest.raises(NotImplementedError, match="LanguageModelConfig: a subclass builds"):
        LanguageModelConfig(5).build(rngs=nnx.Rngs(0))


def test_a_model_refuses_as_a_layer_does():
    config = jax_models.RNNLanguageModelConfig()
    for options, message in (
        ({"rngs": KEY}, r"rngs: expected nnx.Rngs, such as nnx.Rngs\(0\) or nnx.Rngs\(key\), got"),
        (
            {"rngs": nnx.Rngs(0), "dtype": "foo"},
            "dtype: expected one of float16, .*, got 'foo'",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            config.build(**options)
