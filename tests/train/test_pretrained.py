"""`twinscan generate --weights`: published checkpoints and their vocabularies."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from recurrent_gemma import random_model, write_recurrent_gemma
from safetensors.flax import save_file

import train.command.train as train_command
from jax_models import (
    HyenaDNALanguageModelConfig,
    LanguageModel,
    RWKV6LanguageModelConfig,
    RWKV7LanguageModelConfig,
    generate,
    load_pretrained,
    to_torch,
)
from train.command import convert
from train.command import generate as command
from train.command.initial_weights import files_to_keep
from train.command.pretrained import Numbers, read_model, tokens_of
from train.data import published_vocabulary
from train.data.published_vocabulary import Nucleotides, World
from train.run.config import PRESETS
from train.run.folder import Run
from twinscan.command_line import CommandLineError

TEXT = "Grüße, 世界 🎉\n\tdef f(x):"
SIZES = {"features": 8, "num_layers": 2, "head_size": 4}


@pytest.fixture(scope="module")
def world() -> World:
    pytest.importorskip("rwkv")
    return World()


def save_pth(model: LanguageModel, name: str) -> None:
    torch.save({key: torch.tensor(np.asarray(w)) for key, w in to_torch(model).items()}, name)


@pytest.mark.slow
def test_the_pieces_of_the_world_vocabulary(world):
    """A token is a sequence of bytes. A character of several tokens is printed once complete."""
    tokens = world.encode(TEXT, "text")
    assert "".join(world.pieces(tokens[:, None])) == TEXT
    tokens = [byte + 1 for byte in "é🎉".encode()]
    assert [*world.pieces(tokens)] == ["", "é", "", "", "", "🎉", ""]
    assert [*world.pieces(tokens[:1])] == ["", "\N{REPLACEMENT CHARACTER}"]
    letter = ord("a") + 1
    assert "".join(world.pieces([letter, World.end, letter])) == "a"
    assert "".join(world.pieces([letter, World.size - 1])) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
def test_a_checkpoint_continues_a_text(world, tmp_path, monkeypatch, capsys):
    """Runs a command like the one in docs/guides/pretrained.md."""
    monkeypatch.chdir(tmp_path)
    model = random_model(RWKV7LanguageModelConfig(World.size, **SIZES))
    save_pth(model, "RWKV-x070-World-0.1B.pth")
    command.main(["--weights", "RWKV-x070-World-0.1B.pth", "--prompt", TEXT, "--num-tokens", "9"])
    prompt = world.encode(TEXT, "text")[None]
    tokens = generate(model, prompt, 9, key=jax.random.key(0))
    assert capsys.readouterr().out == TEXT + "".join(world.pieces(np.asarray(tokens)[0])) + "\n"


@pytest.mark.slow
def test_tokens_are_continued_by_tokens(tmp_path, capsys):
    """The suffix identifies a safetensors file."""
    model = random_model(RWKV6LanguageModelConfig(30, **SIZES))
    save_file(to_torch(model, "fla"), tmp_path / "a.safetensors")
    arguments = ["--weights", str(tmp_path / "a.safetensors"), "--prompt-tokens", "3 1 4"]
    command.main([*arguments, "--num-tokens", "9", "--greedy"])
    tokens = generate(model, np.array([[3, 1, 4]]), 9, key=jax.random.key(0), temperature=0)
    written = [int(number) for number in capsys.readouterr().out.split()]
    assert written == [3, 1, 4, *np.asarray(tokens)[0]]
    assert [*Numbers().pieces(tokens[0])] == [f" {token}" for token in np.asarray(tokens)[0]]


def test_the_pieces_of_nucleotides():
    """Line ends are no tokens, and some tokens have no letter."""
    vocabulary = Nucleotides()
    tokens = vocabulary.encode("ACG\nTN").tolist()
    assert tokens == [7, 8, 9, 10, 11]
    pieces = vocabulary.pieces([*tokens, 0, vocabulary.end, 7])
    assert "".join(pieces) == "ACGTN\N{REPLACEMENT CHARACTER}"
    with pytest.raises(CommandLineError, match=r"^--prompt: .* got ' ', 'U', 'a'$"):
        vocabulary.encode("aCG U", "--prompt")


def test_the_world_vocabulary_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rwkv.rwkv_tokenizer", None)
    published_vocabulary._trie.cache_clear()
    model = RWKV7LanguageModelConfig(World.size, **SIZES).build(rngs=nnx.Rngs(0))
    path = tmp_path / "world.safetensors"
    save_file(to_torch(model), path)
    with pytest.raises(CommandLineError, match=r"pip install rwkv \(or .*--prompt-tokens"):
        command.main(["--weights", str(path), "--prompt", "a"])
    with pytest.raises(CommandLineError, match=r"--tokenizer: .*pip install rwkv"):
        train_command.main(["--init", str(path), "--text", __file__, "--out", str(tmp_path / "a")])


WORDS = ["<pad>", "</s>", "<bos>", "<eos>", *"abcdefgh"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, LanguageModel]:
    """A folder as transformers writes it, and its model.

    As in Gemma's vocabulary, "</s>" is a word and "<eos>" ends a text. The generation_config.json
    has another token that ends a text.
    """
    folder = tmp_path_factory.mktemp("written") / "recurrentgemma-2b"
    model = write_recurrent_gemma(folder, WORDS, "<bos>", dtype="bfloat16", eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 11]}))
    return folder, model


@pytest.fixture
def recurrent_gemma(written, tmp_path, monkeypatch) -> LanguageModel:
    """The model, in a folder that a test may change."""
    monkeypatch.chdir(tmp_path)
    folder, model = written
    shutil.copytree(folder, folder.name)
    return model


@pytest.mark.slow
def test_a_recurrent_gemma_continues_a_text(recurrent_gemma, capsys):
    """The command stops at the first token that ends a text."""
    read = read_model(Path("recurrentgemma-2b"))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(read, nnx.Param))} == {jnp.dtype("bfloat16")}
    assert [*tokens_of(read, Path("recurrentgemma-2b")).encode("a b")] == [2, 4, 5]
    for seed in range(2):
        command.main([
            *["--weights", "recurrentgemma-2b", "--prompt", "a b"],
            *["--num-tokens", "9", "--seed", str(seed)],
        ])  # fmt: skip
        tokens = generate(recurrent_gemma, np.array([[2, 4, 5]]), 9, key=jax.random.key(seed))
        numbers = [*np.asarray(tokens)[0].tolist(), 3]
        end = min(numbers.index(token) for token in (3, 11) if token in numbers)
        text = " ".join(WORDS[token] for token in numbers[:end])
        assert capsys.readouterr().out.removeprefix("a b").strip() == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "recurrentgemma-2b has no tokenizer.json .*--prompt-tokens"),
        ("tokenizer.json", "{}", "recurrentgemma-2b: not a tokenizer: "),
    ],
)
def test_a_folder_that_is_damaged_is_refused(recurrent_gemma, name, content, message):
    """The error has one line. `test_load_pretrained.py` tests more kinds of damage."""
    path = Path("recurrentgemma-2b", name)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CommandLineError, match=message) as refused:
        command.main(["--weights", "recurrentgemma-2b", "--prompt", "a"])
    assert "\n" not in str(refused.value)


def test_the_end_of_a_multimodal_models_text(recurrent_gemma):
    """Its config.json names the token in the part about the language model."""
    folder = Path("recurrentgemma-2b")
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 3}}))
    assert tokens_of(recurrent_gemma, folder).ends == (3,)


@pytest.mark.usefixtures("recurrent_gemma")
@pytest.mark.parametrize(
    ("options", "end"),
    [
        ([], "<eos>"),
        (["--tokenizer", "recurrentgemma-2b/tokenizer.json"], "<eos>"),
        (["--tokenizer", "other.json"], None),
        (["--tokenizer", "other.json", "--end-of-text", "<eos>"], "<eos>"),
    ],
)
def test_the_end_of_text_belongs_to_the_tokenizer(options, end):
    """Another tokenizer may lack the token that ends a text in the checkpoint's."""
    eos = {"eos_token": {"content": "<eos>"}}
    Path("recurrentgemma-2b", "tokenizer_config.json").write_text(json.dumps(eos))
    parsed = train_command.parse_arguments(["--init", "recurrentgemma-2b", "--text", "a", *options])
    assert parsed.config.end_of_text == end


@pytest.mark.slow
def test_a_checkpoint_of_others_is_tuned(recurrent_gemma, unreported):
    """It becomes a folder of transformers again. A tiny learning rate keeps the weights.

    Model and tokenizer default to the checkpoint's.
    """
    for name in ("a", "b"):
        Path(name).write_text("a b c d e f g " * 200)
    eos = {"eos_token": {"content": "<eos>"}}
    Path("recurrentgemma-2b", "tokenizer_config.json").write_text(json.dumps(eos))
    train_command.main([
        *["--init", "recurrentgemma-2b", "--text", "a", "b", "--out", "run", "--num-steps", "2"],
        *["--optimizer.learning-rate", "1e-9"],
    ])  # fmt: skip
    run = Run.open(Path("run"))
    assert run.config.model == recurrent_gemma.config
    assert run.vocabulary.encode("a g").tolist() == [4, 10]
    assert run.vocabulary.end_of_text == WORDS.index("<eos>")
    kept = {path.name: path.read_bytes() for path in run.pretrained.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} < kept.keys()
    for source in (Path("recurrentgemma-2b"), run.folder):
        assert files_to_keep(source, run.vocabulary) == kept
    tuned = to_torch(run.model(), "hf-file")
    for key, array in to_torch(recurrent_gemma, "hf-file").items():
        expected = np.asarray(array, np.float32)
        np.testing.assert_allclose(tuned[key], expected, rtol=0, atol=1e-7, err_msg=key)
    convert.main(["--from", "run", "--to", "tuned", "--param-dtype", "bfloat16"])
    written = load_pretrained("tuned")
    assert written.config == recurrent_gemma.config
    for key, array in to_torch(written, "hf-file").items():
        assert array.tobytes() == tuned[key].astype(jnp.bfloat16).tobytes(), key
    tokenizers = [Path(folder, "tokenizer.json") for folder in ("recurrentgemma-2b", "tuned")]
    assert len({json.dumps(json.loads(path.read_text())) for path in tokenizers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "undetermined"), [("lstm", None), ("qwen3_5", "num_key_heads")])
def test_a_file_without_a_config_says_its_model(name, undetermined, tmp_path):
    """If its weights do not determine a field, the error asks for the options."""
    config, path = replace(PRESETS[name].model, vocab_size=20), tmp_path / "a.safetensors"
    model = config.build(rngs=nnx.Rngs(0))
    save_file(to_torch(model), path)
    (tmp_path / "a").write_text("abc" * 2000)
    args = ["--init", str(path), "--text", str(tmp_path / "a"), "--tokenizer", "characters"]
    if undetermined is not None:
        with pytest.raises(CommandLineError, match=f"{undetermined}: .*give the --preset"):
            train_command.parse_arguments(args)
        args += ["--preset", name, "--model.vocab-size", "20", "--val-rows", "1"]
    plan = train_command.make_plan(train_command.parse_arguments(args))
    assert type(plan.config.model) is type(config)
    _, state = train_command.build_trainer_of_plan(plan)
    chex.assert_trees_all_equal(state.params, nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_a_model_of_nucleotides_is_trained_on(tmp_path, monkeypatch, capsys):
    """The text has several lines, and some tokens of the vocabulary have no meaning."""
    monkeypatch.chdir(tmp_path)
    model = random_model(HyenaDNALanguageModelConfig(context_length=32, features=8, mlp_features=9))
    save_pth(model, "hyenadna.pth")
    Path("genome").write_text(30 * "ACGTTGCANNACGGT\n")
    train_command.main([
        *["--init", "hyenadna.pth", "--text", "genome", "--out", "run", "--num-steps", "2"],
        *["--window", "32", "--batch-size", "2", "--eval-batches", "1"],
    ])  # fmt: skip
    run = Run.open(Path("run"))
    assert (run.vocabulary, run.config.model.vocab_size) == (Nucleotides(), 16)
    capsys.readouterr()
    command.main(["--run", "run", "--prompt", "ACG", "--num-tokens", "9"])
    assert capsys.readouterr().out.startswith("ACG")
