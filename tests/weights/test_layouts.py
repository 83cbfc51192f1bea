"""The layouts of each language model, and files that are not checkpoints of it."""

import contextlib
import re
from dataclasses import replace
from typing import ClassVar, get_args

import numpy as np
import pytest
from published import (
    FAMILIES,
    GRIFFIN,
    HYENA_DNA,
    MODELS,
    RWKV7,
    abstract,
    assert_same_weights,
    build,
    fields_of_shapes,
    fields_without_shape,
    initial,
    weights_of,
)

from jax_models import (
    GPModelConfig,
    HawkLanguageModelConfig,
    LanguageModelConfig,
    RNNLanguageModelConfig,
    from_torch,
    from_weights,
    to_torch,
)
from jax_models.models.architecture import Checkpoint, Layout, Mark, architectures
from jax_models.models.load import config_of
from jax_models.models.silero_vad import SileroVADConfig
from jax_models.weights.layouts import params_of

CONFIGS = MODELS | {
    "Griffin with other options": replace(
        GRIFFIN,
        num_kv_heads=2,
        kernel_size=3,
        attention_bias=True,
        block_types=("attention", "recurrent", "recurrent"),
    ),
    "HyenaDNA with a head of its own": replace(HYENA_DNA, tied_head=False, order=3),
    "RWKV-6 of one layer": replace(MODELS["RWKV6LanguageModel"], num_layers=1),
    "RWKV-7 of one layer": replace(RWKV7, num_layers=1, value_rank=32),  # mixes no values
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_is_read_with_the_config_of_its_shapes(name):
    config = CONFIGS[name]
    options = fields_without_shape(config)
    for layout in initial(config).torch_layouts():
        loaded = from_weights(weights_of(config, layout), **options)
        assert loaded.config == config, layout
        assert_same_weights(to_torch(loaded), weights_of(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tied_keys_may_be_repeated_or_left_out(name):
    """A tied head, for example, may be in a checkpoint in any layout that has a key for it."""
    config = MODELS[name]
    tables, options = initial(config).torch_layouts(), fields_without_shape(config)
    names = {layout: {key for row in table for key in row.keys} for layout, table in tables.items()}
    for layout, table in tables.items():
        weights, rows = weights_of(config, layout), [r for r in table if r.tied and r.params]
        untied = weights.keys() - {key for row in rows for key in row.tied}
        for there in (np.s_[:], np.s_[:1], np.s_[-1:]) if rows else ():
            given = {key: weights[key] for key in untied}
            for row in rows:
                given |= dict.fromkeys(row.tied[there], weights[row.keys[0]])
            loaded = from_torch(abstract(config), given, layout)
            assert_same_weights(to_torch(loaded, layout), weights)
            # Without the layout's name, the keys identify it, unless they are another layout's.
            if config.layouts[layout].embedding in given and given.keys() not in names.values():
                assert config_of(given, **options) == config
                loaded = from_torch(abstract(config), given)
                assert_same_weights(to_torch(loaded, layout), weights)


def alternatives(value, annotation):
    """Other values of a field, of which some may not fit the other fields."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, max(value // 2, 1)]
    if isinstance(value, float):
        return [value / 2, value / 2 + 0.1]
    if isinstance(value, tuple):
        return [value[::-1], value[-1:]]
    return [each for each in get_args(annotation) if each != value and isinstance(each, str)]


def shapes_of(config):
    return {path: param.shape for path, param in params_of(abstract(config)).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_that_changes_a_shape_is_read_from_it(name):
    config, types = MODELS[name], type(MODELS[name]).field_types()
    shapes = shapes_of(config)
    read, given = fields_of_shapes(config)
    for field in vars(config).keys() - read - given:
        for other in alternatives(getattr(config, field), types[field]):
            with contextlib.suppress(ValueError, UserWarning):  # it does not fit the others
                assert shapes_of(replace(config, **{field: other})) == shapes, field


ATTENTION_FIRST = ("full_attention", "linear_attention")
MARKED = {name: MODELS[name] for name in FAMILIES if MODELS[name].marks} | {
    f"{name}, attention first": replace(MODELS[name], block_types=ATTENTION_FIRST)
    for name in ("BambaLanguageModel", "JambaLanguageModel")
}


@pytest.mark.parametrize("name", MARKED)
def test_the_marks_of_a_model_are_not_those_of_another(name):
    """Without a config.json, they identify a checkpoint in any layout, also under a prefix."""
    config = MARKED[name]
    for table in abstract(config).torch_layouts().values():
        keys = dict.fromkeys(f"model.{key}" for row in table for key in row.keys)
        found = [each for each in architectures() if each.marks and each.recognizes(keys)]
        assert found == [type(config)]


@pytest.mark.parametrize("marks", ["ab", Mark(("ab",)), (Mark("ab"),), (3,)], ids=str)
def test_marks_are_checked(marks):
    with pytest.raises(TypeError, match=r"^Other\.marks: expected "):
        type("Other", (LanguageModelConfig,), {"marks": marks})


def test_every_language_model_is_read():
    assert {*map(type, MODELS.values())} == {*architectures(LanguageModelConfig)}


EDITS = {
    "it has no": lambda weights, layout: {},
    "module": lambda weights, layout: {f"module.{key}": a for key, a in weights.items()},
    "give state_dict": lambda weights, layout: {"epoch": 3, "model": weights},
    "expected a mapping": lambda weights, layout: [weights],
    "expected 2 axes": lambda weights, layout: weights | {layout.embedding: np.zeros(3)},
    "none empty": lambda weights, layout: weights | {layout.embedding: np.zeros((3, 0))},
    "0, 1, 2, …, got .*1": lambda weights, layout: {
        key: a for key, a in weights.items() if not key.startswith(f"{layout.blocks}.0.")
    },
    "0, 1, 2, …, got .*x": lambda weights, layout: weights | {f"{layout.blocks}.x.y": np.zeros(3)},
}


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_checkpoint_of_the_model_is_refused(name, edit):
    config = MODELS[name]
    if "0, 1" in edit and isinstance(config, RNNLanguageModelConfig):
        return  # its blocks are not numbered
    layout = next(iter(initial(config).torch_layouts()))
    edited = EDITS[edit](weights_of(config, layout), config.layouts[layout])
    with pytest.raises((TypeError, ValueError), match=edit):
        type(config).from_state_dict(edited)


ZAMBA2, SHARED = (
    MODELS["Zamba2LanguageModel"],
    "model.layers.3.shared_transformer.input_layernorm.weight",
)
FREQUENCY = "backbone.layers.0.mixer.filter_fn.implicit_filter.3.freq"
POSITIONS = "backbone.layers.1.mixer.filter_fn.pos_emb.z"


@pytest.mark.parametrize(
    ("message", "config", "change"),
    [
        ("pos_emb.z:", HYENA_DNA, {POSITIONS.replace("1", "0"): np.ones((13, 5))}),
        ("pos_emb.z:", HYENA_DNA, {POSITIONS: np.ones((1, 12, 5))}),
        ("two different arrays", HYENA_DNA, {FREQUENCY: np.ones((1, 7), np.float32)}),
        ("two different arrays", ZAMBA2, {SHARED: np.full(16, 2, np.float32)}),
        ("two different arrays", GRIFFIN, {"lm_head.weight": np.ones((11, 8), np.float32)}),
    ],
)
def test_weights_that_contradict_each_other_are_refused(message, config, change):
    weights = weights_of(config) | change
    with pytest.raises(ValueError, match=message):
        from_torch(build(config_of(weights, **fields_without_shape(config))), weights)


GP = GPModelConfig(context_length=8, features=12, num_layers=1, num_heads=2)
FOLDER = ", or load the folder with the config.json"


@pytest.mark.parametrize(
    ("config", "name", "way_out"),
    [
        (replace(GP, block="authentic-hyena"), "implicit", ""),
        (replace(GP, block="attention"), "num_heads", ""),
        (MODELS["OLMoHybridLanguageModel"], "num_heads", FOLDER),
        (MODELS["Qwen35LanguageModel"], "num_key_heads", FOLDER),
        (MODELS["GraniteLanguageModel"], "embedding_multiplier", FOLDER),
        (MODELS["GraniteLanguageModel, experts"], "experts_per_token", FOLDER),
        (MODELS["LFM2LanguageModel, experts"], "experts_per_token", FOLDER),
        (MODELS["LFM3LanguageModel"], "block_types", FOLDER),
        (MODELS["FalconH1LanguageModel"], "embedding_multiplier", FOLDER),
        (MODELS["NemotronHLanguageModel"], "num_heads", FOLDER),
        (MODELS["JambaLanguageModel"], "experts_per_token", FOLDER),
        (MODELS["MiniMaxLanguageModel"], "num_heads", FOLDER),
        (ZAMBA2, "num_groups", FOLDER),
    ],
)
def test_a_field_that_no_shape_determines_must_be_given(config, name, way_out):
    weights = weights_of(config)
    message = f"{name}: no shape determines it; pass {name}=…{way_out}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config_of(weights)
    assert config_of(weights, **fields_without_shape(config)) == config


def test_a_config_without_sizes_is_not_guessed():
    class Unsized(HawkLanguageModelConfig):
        layouts: ClassVar = {"hawk": HawkLanguageModelConfig.layouts["hawk"]._replace(sizes=None)}

    config = Unsized(features=8, num_layers=1, mlp_features=8)
    weights = weights_of(config)
    with pytest.raises(NotImplementedError, match=r"^Unsized: no layout says how"):
        Unsized.from_state_dict(weights)
    assert Unsized.from_state_dict(weights, **vars(config)) == config


KEYS = Layout("embedding.weight", "blocks", "norm.weight")
WRONG_LAYOUTS = {
    ": expected Layout(": (TypeError, ["embedding.weight", "blocks", "norm.weight"]),
    ".norm: expected str, got an int": (TypeError, KEYS._replace(norm=3)),
    ".head: expected str, got a tuple of 1": (TypeError, KEYS._replace(head=("head.weight",))),
    ".repeats_embedding: expected True or False, got 1": (
        ValueError,
        KEYS._replace(repeats_embedding=1),
    ),
    ".positions: expected Weight(": (TypeError, KEYS._replace(positions="positions.weight")),
    ": the keys of embedding, norm and head: expected different names, got 'norm.weight' 2 times": (
        ValueError,
        KEYS._replace(head="norm.weight"),
    ),
    ".sizes: expected a function, got a dict": (
        TypeError,
        KEYS._replace(sizes={"units": 3}),  # pyright: ignore[reportArgumentType]
    ),
}


@pytest.mark.parametrize("message", WRONG_LAYOUTS)
def test_a_wrong_layout_is_refused_where_its_class_is_defined(message):
    error, layout = WRONG_LAYOUTS[message]
    with pytest.raises(error, match="^" + re.escape(f"Wrong.layouts['of mine']{message}")):

        class Wrong(HawkLanguageModelConfig):
            layouts: ClassVar = {"of mine": layout}


def test_the_norm_of_a_block_is_not_taken_for_the_last_one():
    class Other(LanguageModelConfig):
        layouts: ClassVar = {"of mine": KEYS}

    with pytest.raises(ValueError, match=r"it has no embedding\.weight$"):
        Other.from_state_dict({"blocks.0.norm.weight": np.ones(3)})


ESN = {
    "blocks.0.esn.leak": np.float32(0.25),
    "blocks.0.esn.bias": np.ones(3),
    "blocks.1.out.bias": np.ones(5),
    "rnn.w": np.ones(4),
}


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda it: it.value("*.esn.leak"), 0.25),
        (lambda it: it.value("blocks.0.esn.leak"), 0.25),
        (lambda it: it.size("*.esn.bias", 0), 3),
        (lambda it: it.size("*.esn.bias", -1), 3),
        (lambda it: it.size("*.out.bias", 0), 5),
        (lambda it: it.size("rnn.w", 0, rank=1), 4),
        (lambda it: [it.has(key) for key in ("*.out.bias", "*.w", "rnn.w")], [True, False, True]),
        (lambda it: it.first("*.w", "*.out.bias", "rnn.w"), "*.out.bias"),
        (lambda it: it.first("*.w", "*.u"), "*.u"),
        (lambda it: it.in_blocks("*.out.bias"), [False, True]),
        (lambda it: [it.given("units", 3), it.given("leak", 3)], [7, 3]),
    ],
)
def test_a_checkpoint_is_read_in_and_outside_of_the_blocks(read, value):
    assert read(Checkpoint(ESN, KEYS, {"units": 7})) == value


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("leak", lambda it: it.given("leak")),
        (r"blocks\.\*\.w and no u", lambda it: [it.size("*.w", 0), it.size("u", 0)]),
        ("expected a scalar, got shape (3,); .* call `size`", lambda it: it.value("*.esn.bias")),
        ("an axis 0, none empty, got (); .* call `value`", lambda it: it.size("*.esn.leak", 0)),
        ("2 axes, none empty, got (3,)", lambda it: it.size("*.esn.bias", 0, rank=2)),
        ("an axis 1, none empty, got (3,)", lambda it: it.size("*.esn.bias", 1)),
    ],
)
def test_what_a_checkpoint_lacks_is_named(message, read):
    pattern = message.replace("(", r"\(").replace(")", r"\)")
    layout = KEYS._replace(sizes=lambda checkpoint: {"units": read(checkpoint)})
    with pytest.raises(ValueError, match=f"{pattern}$"):
        Checkpoint(ESN | {"embedding.weight": np.ones((5, 3))}, layout).fields()


@pytest.mark.parametrize(
    "weights", [{}, {"a": np.zeros(3)}, {"stft": 3}, {"stft": np.zeros(())}, {3: np.zeros(256)}]
)
def test_weights_without_an_stft_are_no_silero_vads(weights):
    with pytest.raises(ValueError, match=r"^state_dict: expected an stft"):
        SileroVADConfig.from_state_dict(weights)
    with pytest.raises(TypeError, match=r"^state_dict: expected a mapping"):
        SileroVADConfig.from_state_dict([*weights])
