"""Every config and function of a run with one wrong argument at a time: one line that names it."""

import dataclasses
import inspect
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_models import RNNLanguageModel, RNNLanguageModelConfig
from jax_models.options import Index
from train.checks import Betas, NotNegative, Paths, Positive, Seed
from train.config import TrainConfig, from_fields, to_fields
from train.export import export
from train.generate import Arguments
from train.mesh import MeshConfig, build_mesh
from train.optimizer import OptimizerConfig, build_optimizer
from train.run import Run, build_trainer
from train.step import Trainer
from train.text import Text
from train.vocabulary import Characters
from train.windows import Batches, Windows, split

NAN = float("nan")
COUNTS, NUMBERS = (True, 2.5, "3", -1, NAN, [1]), (True, "3", -1, NAN, float("inf"), [1])
WRONG = {
    int: (*COUNTS, 0, 2**31, None),
    int | None: (*COUNTS, 0, 2**31),
    Index: (*COUNTS, None),
    Index | None: COUNTS,
    Seed: (*COUNTS, 2**31, None),
    Positive: (*NUMBERS, 0, None),
    Positive | None: (*NUMBERS, 0),
    NotNegative: (*NUMBERS, None),
    Betas: (0.9, "ab", (0.9,), (0.9, 1), (NAN, 0), (True, 0), None),
    bool: (1, "no", None),
    Path: (3, None),
    Path | None: (3, True, b"x"),
    Paths: (3, True, b"x", [3]),
}
MODEL = nnx.eval_shape(lambda: RNNLanguageModelConfig().build(rngs=nnx.Rngs(0)))
VOCABULARY = Characters("abc")
TOKENS = np.arange(99)
TRAINER = {
    "model": MODEL,
    "optimizer": optax.sgd(1.0),
    "mesh": build_mesh(MeshConfig(), rows=4, window=8, devices=jax.devices()),
    "seed": 0,
}
CALLS = {
    TrainConfig: {},
    OptimizerConfig: {},
    Arguments: {"run": Path()},
    Characters: {"characters": "abc"},
    Characters.of: {"text": "abc"},
    VOCABULARY.encode: {"text": "abc"},
    split: {"tokens": TOKENS, "window": 4},
    Batches: {"windows": Windows(TOKENS, 4, TOKENS[:9]), "batch_size": 2, "seed": 0},
    build_optimizer: {"config": OptimizerConfig(), "num_steps": 9},
    build_trainer: {"config": TrainConfig()},
    Trainer: TRAINER,
    Run.open: {"folder": Path()},
    Run.create: {
        "folder": Path(),
        "config": TrainConfig(),
        "vocabulary": VOCABULARY,
        "text_digest": "",
    },
    export: {"model": MODEL, "path": Path()},
    RNNLanguageModel: {"config": RNNLanguageModelConfig(), "rngs": nnx.Rngs(0)},
}
UNCHECKED = {"self", "mesh", "devices"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_refuses_each_wrong_argument(call):
    parameters = inspect.signature(call.__init__ if isinstance(call, type) else call).parameters
    for name in parameters.keys() - UNCHECKED:
        for value in WRONG.get(parameters[name].annotation, (3, b"x", OptimizerConfig)):
            with pytest.raises((TypeError, ValueError)) as error:
                call(**{**CALLS[call], name: value})
            assert re.fullmatch(rf"{name}: expected [^\n]+, got [^\n]+", str(error.value))


def test_numpys_numbers_are_kept_as_pythons():
    config = TrainConfig(num_steps=np.int64(3), num_epochs=np.float32(2), seed=np.uint8(1))
    assert from_fields(to_fields(config)) == dataclasses.replace(config)
    assert [type(v) for v in (config.num_steps, config.num_epochs, config.seed)] == [
        int,
        float,
        int,
    ]


def test_a_path_may_be_a_str(tmp_path):
    (tmp_path / "text").write_text("abc")
    assert [*Text([str(tmp_path / "text")]).pieces()] == ["abc", None]
    assert TrainConfig(text="x").text == (Path("x"),)  # pyright: ignore[reportArgumentType]
    assert TrainConfig(init="x").init == Path("x")  # pyright: ignore[reportArgumentType]
