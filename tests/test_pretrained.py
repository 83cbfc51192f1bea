"""`twinscan generate --weights`: checkpoints of others, and RWKV's World vocabulary."""

import sys

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.flax import save_file

from jax_models import (
    LanguageModel,
    RWKV6LanguageModelConfig,
    RWKV7LanguageModelConfig,
    generate,
    to_torch,
)
from train import generate as command
from train.pretrained import END_OF_TEXT, WORLD_SIZE, Numbers, World

TEXT = "Grüße, 世界 🎉\n\tdef f(x):"
SIZES = {"features": 8, "num_layers": 2, "head_size": 4}


@pytest.fixture
def world() -> World:
    pytest.importorskip("rwkv")
    return World()


def random_model(config) -> LanguageModel:
    """Of weights other than those that a model starts from, many of which are zero."""
    model = config.build(rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    nnx.update(
        model, jax.tree.map(lambda x: 0.4 * rng.standard_normal(x.shape, x.dtype), nnx.state(model))
    )
    return model


def test_the_world_vocabulary_comes_back_piece_by_piece(world):
    tokens = world.encode(TEXT, "text")
    pieces = [*world.pieces(tokens[:, None])]
    assert "".join(pieces) == TEXT
    assert len(pieces) == len(tokens) + 1


def test_a_character_of_several_tokens_is_written_when_it_is_whole(world):
    """A World token is any byte: 1 and its value more."""
    tokens = [byte + 1 for byte in "é🎉".encode()]
    assert [*world.pieces(tokens)] == ["", "é", "", "", "", "🎉", ""]
    assert [*world.pieces(tokens[:1])] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_a_text_ends_at_its_end(world):
    letter = ord("a") + 1
    assert "".join(world.pieces([letter, END_OF_TEXT, letter])) == "a"
    assert "".join(world.pieces([letter, WORLD_SIZE - 1])) == "a\N{REPLACEMENT CHARACTER}"


def test_the_text_of_a_checkpoint_goes_on(world, tmp_path, monkeypatch, capsys):
    """The command of docs/weights.md."""
    monkeypatch.chdir(tmp_path)
    model = random_model(RWKV7LanguageModelConfig(WORLD_SIZE, **SIZES))
    weights = {key: torch.tensor(np.asarray(w)) for key, w in to_torch(model).items()}
    torch.save(weights, "RWKV-x070-World-0.1B.pth")
    command.main(["--weights", "RWKV-x070-World-0.1B.pth", "--prompt", TEXT, "--num-tokens", "9"])
    prompt = world.encode(TEXT, "text")[None]
    tokens = generate(model, prompt, 9, key=jax.random.key(0))
    assert capsys.readouterr().out == TEXT + "".join(world.pieces(np.asarray(tokens)[0])) + "\n"


def test_tokens_go_on_as_tokens(tmp_path, capsys):
    """Of a safetensors file, by its suffix."""
    model = random_model(RWKV6LanguageModelConfig(30, **SIZES))
    save_file(to_torch(model, "fla"), tmp_path / "a.safetensors")
    arguments = ["--weights", str(tmp_path / "a.safetensors"), "--prompt-tokens", "3 1 4"]
    command.main([*arguments, "--num-tokens", "9", "--greedy"])
    tokens = generate(model, np.array([[3, 1, 4]]), 9, key=jax.random.key(0), temperature=0)
    written = [int(number) for number in capsys.readouterr().out.split()]
    assert written == [3, 1, 4, *np.asarray(tokens)[0]]
    assert [*Numbers().pieces(tokens[0])] == [f" {token}" for token in np.asarray(tokens)[0]]


def test_the_world_vocabulary_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rwkv.rwkv_tokenizer", None)
    with pytest.raises(command.CommandLineError, match=r"pip install rwkv .*--prompt-tokens"):
        World()
