"""Texts with many files and documents, their token files, and batches."""

import errno
import json
import os
import pwd
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

import train.command.train as train_command
import train.data.text
from jax_models import LanguageModel, RNNLanguageModelConfig
from train.command import evaluate, generate
from train.data.text import ALL_WORK, Text, default_cache
from train.data.vocabulary import Bytes, Characters, Subwords, from_fields
from train.data.windows import Batches, Windows, split
from train.run.config import TrainConfig
from train.run.folder import Run, build_trainer
from twinscan.command_line import CommandLineError

RNG = np.random.default_rng(0)
LETTERS = list("abcdé漢\U0001f600 \n\n")


def sentence(length: int) -> str:
    return "a" + "".join(RNG.choice(LETTERS, length)) + "b"


def tokenizer(end: str | None = "<|endoftext|>") -> str:
    """A byte-level tokenizer of the package `tokenizers`, like GPT-2's."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[] if end is None else [end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([ALL_WORK, sentence(500)], trainer)
    return made.to_str()


def documents(text: Text) -> list[str]:
    found, parts = [], []
    for piece in text.pieces():
        if piece is None:
            found.append("".join(parts))
            parts = []
        else:
            parts.append(piece)
    assert not parts
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with text files, a file of JSON lines, and a hidden file."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / ".hidden").write_text("no")
    (tmp_path / "texts" / "b.txt").write_bytes(b"eins\r\nzwei")
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "one\\ntwo"}\n\n{"text": "three"}\n')
    (tmp_path / "texts" / "more" / "c").write_text("漢字")
    return tmp_path / "texts"


def test_documents_of_a_folder(folder):
    text = Text([folder])
    assert documents(text) == ["one\ntwo", "three", "eins\nzwei", "漢字"]
    assert text.has_documents
    assert not Text([folder / "b.txt"]).has_documents
    assert Text([folder / "b.txt", folder / "more" / "c"]).has_documents


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("separator", [None, "|", "<|end|>", "\n"])
def test_documents_however_they_are_read(block, separator, tmp_path, monkeypatch):
    monkeypatch.setattr(train.data.text, "LONGEST_LINE", 40)
    monkeypatch.setattr("train.process.files.BLOCK", block)
    written = [sentence(n) for n in (1, 3, 200, 0, 57)]
    content = (separator or "").join(written)
    path = tmp_path / "text"
    path.write_bytes((content + (separator or "")).encode())
    expected = [part for part in content.split(separator) if part] if separator else [content]
    assert documents(Text([path], separator)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["characters", "bytes", "tokenizer", "world"])
def test_tokens_of_documents(kind, folder, tmp_path):
    """The end-of-text token ends each document. The second call reads the cached file."""
    if kind == "world":
        pytest.importorskip("rwkv")
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    text = Text([folder])
    vocabulary = text.build_vocabulary(
        str(tmp_path / "tokenizer.json") if kind == "tokenizer" else kind
    )
    assert from_fields(json.loads(json.dumps(vocabulary.fields()))) == vocabulary
    end = vocabulary.end_of_text
    expected = np.concatenate([[*vocabulary.encode(part), end] for part in documents(text)])
    for _ in range(2):
        tokens = text.tokens(vocabulary, tmp_path / "cache")
        assert len(tokens) == len(expected)
        np.testing.assert_array_equal(tokens[np.arange(len(tokens))], expected)
    first = expected[: list(expected).index(end) + 3]
    assert "".join(vocabulary.pieces(first)) == "one\ntwo"
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_a_tokenizer_sees_a_long_text_as_a_short_one(tmp_path, monkeypatch):
    """The text is divided at its line ends."""
    vocabulary = Subwords(tokenizer())
    content = "".join(sentence(30) for _ in range(50))
    (tmp_path / "text").write_text(content)
    monkeypatch.setattr("train.process.files.BLOCK", 64)
    tokens = Text([tmp_path / "text"]).tokens(vocabulary, tmp_path / "cache")
    np.testing.assert_array_equal(tokens[np.arange(len(tokens))], vocabulary.encode(content))


def killed(*_):
    raise KeyboardInterrupt


@pytest.fixture
def all_work(tmp_path) -> Text:
    (tmp_path / "text").write_text(ALL_WORK)
    return Text([tmp_path / "text"])


@pytest.mark.parametrize("damage", ["flip", "lose", "manifest"])
def test_damaged_tokens_are_made_again(damage, all_work, tmp_path, capsys):
    all_work.tokens(Bytes(), tmp_path / "cache")
    [tokens], [manifest] = tmp_path.glob("cache/*/tokens"), tmp_path.glob("cache/*/manifest.json")
    data = tokens.read_bytes()
    if damage == "flip":
        tokens.write_bytes(data[:99] + bytes([data[99] ^ 4]) + data[100:])
    elif damage == "lose":
        tokens.unlink()
    else:
        manifest.write_text("{")
    again = all_work.tokens(Bytes(), tmp_path / "cache")
    assert "the cached tokens are damaged; tokenizing again" in capsys.readouterr().err
    assert bytes(again[np.arange(len(again))]) == tokens.read_bytes() == data == ALL_WORK.encode()


def test_a_killed_writer_leaves_no_tokens(all_work, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            all_work.tokens(Bytes(), cache)
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    assert len(all_work.tokens(Bytes(), cache)) == len(ALL_WORK)
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [""]


def test_a_text_that_changes_while_it_is_read_is_refused(all_work, tmp_path):
    (tmp_path / "text").write_text(ALL_WORK + "More.")
    with pytest.raises(CommandLineError, match="changed while it was read"):
        all_work.tokens(Bytes(), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


REFUSED = {
    "not UTF-8": ("d.txt", 3 * b"abc\n" + b"caf\xe9 \n", r"d.txt: not UTF-8 at byte 15"),
    "half a character": ("d.txt", "abc漢".encode()[:-1], r"d.txt: not UTF-8 at byte 3"),
    "another field": ("d.jsonl", b'{"text": "a"}\n{"content": "a"}', "d.jsonl: line 2:"),
    "too deep": ("d.jsonl", b"[" * 100_000, "d.jsonl: line 1:"),
    "half a pair": ("d.jsonl", b'{"text": "\\ud800"}', "d.jsonl: line 1: .* in UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_fault_in_one_of_many_files_is_named(case, folder):
    name, content, message = REFUSED[case]
    (folder / name).write_bytes(content)
    with pytest.raises(CommandLineError, match=message):
        list(Text([folder]).pieces())


def test_all_of_a_folder_is_read_or_refused(folder, monkeypatch):
    (folder / "z").symlink_to("nowhere")
    with pytest.raises(CommandLineError, match=r"z: No such file or directory"):
        Text([folder])
    (folder / "z").unlink()
    scandir = os.scandir

    def refused(path):  # the tests may run as root, who could read it
        if Path(path).name in ("more", ".git"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(CommandLineError, match=r"more: Permission denied"):
        Text([folder])
    (folder / "more").rename(folder / ".git")
    assert len(Text([folder]).files) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "the folder has no files"),
        ("empty", "the file is empty"),
        ("pipe", "expected a file or a folder"),
    ],
)
def test_what_holds_no_text_is_refused(name, message, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CommandLineError, match=f"{name}: {message}$"):
        Text([tmp_path / name])


def test_several_documents_need_an_end(folder, tmp_path):
    with pytest.raises(CommandLineError, match="no end-of-text token"):
        Text([folder]).tokens(Bytes(), tmp_path / "cache")
    (tmp_path / "t.json").write_text(tokenizer(end=None))
    with pytest.raises(CommandLineError, match=r"--tokenizer: .*t.json: the tokenizer has no tok"):
        Text([folder]).build_vocabulary(str(tmp_path / "t.json"), end="<eos>")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(CommandLineError, match=r"--tokenizer: .*t.json: not a tokenizer"):
        Text([folder]).build_vocabulary(str(tmp_path / "t.json"))


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    """The loss depends only on the token's own document, which begins with the last one's end."""
    vocabulary = Characters(Characters.of(ALL_WORK).characters, has_end=True)
    config = TrainConfig(model=RNNLanguageModelConfig(vocab_size=len(vocabulary)))
    trainer = build_trainer(config, vocabulary, jax.devices()[:1])
    params = trainer.initial_state().params
    rows = RNG.integers(0, len(vocabulary) - 1, (2, 9))
    rows[:, 3] = vocabulary.end_of_text
    rows[1, 3:] = rows[0, 3:]
    losses = np.asarray(trainer.evaluate(params, rows[None]))[0]
    assert (losses[0, :2] != losses[1, :2]).all()
    np.testing.assert_array_equal(losses[0, 3:], losses[1, 3:])
    without = build_trainer(config, None, jax.devices()[:1])
    assert (np.asarray(without.evaluate(params, rows[None]))[0, :, 3:] != losses[:, 3:]).all()


@pytest.mark.slow
def test_a_run_on_a_folder_with_a_tokenizer(folder, tmp_path, monkeypatch, capsys):
    """It trains, resumes, is evaluated and generates text without the tokenizer's file."""
    (folder / "long.txt").write_text(20 * ALL_WORK)
    (tmp_path / "t.json").write_text(tokenizer())
    monkeypatch.setattr(train_command, "report", lambda *_: None)
    small = ["--num-steps", "10", "--eval-every", "5", "--eval-batches", "2"]
    given = ["--text", str(folder), "--tokenizer", str(tmp_path / "t.json")]
    train_command.main(["--out", str(tmp_path / "run"), *given, *small])
    (tmp_path / "t.json").unlink()
    train_command.main(["--resume", str(tmp_path / "run"), "--num-steps", "15"])
    run = Run.open(tmp_path / "run")
    assert run.checkpoints.latest_step == 15
    assert isinstance(run.vocabulary, Subwords)
    assert isinstance(run.model(), LanguageModel)
    capsys.readouterr()
    evaluate.main(["--run", str(tmp_path / "run")])
    assert "nats per token" in capsys.readouterr().out
    generate.main(["--run", str(tmp_path / "run"), "--prompt", "All", "--num-tokens", "9"])
    assert capsys.readouterr().out.startswith("All")
    generate.main(["--run", str(tmp_path / "run"), "--num-tokens", "9"])
    (folder / "more" / "c").write_text("changed")
    with pytest.raises(CommandLineError, match=r"the run in .* began with another text"):
        train_command.main(["--resume", str(tmp_path / "run"), "--num-steps", "20"])


TOKENS = np.arange(101, dtype=np.int32)


def stacked(windows: Windows) -> np.ndarray:
    return np.stack([windows[i] for i in range(len(windows))])


@pytest.mark.parametrize(
    ("val_rows", "lengths", "rows"),
    [(None, {"train": 83, "val": 3}, {"train": 12, "val": 1})]
    + [(n, {"train": 14 - n, "val": n}, {"train": 14 - n, "val": n}) for n in (3, 13)],
)
def test_parts_predict_different_tokens(val_rows, lengths, rows):
    parts = split(TOKENS[:99] if val_rows else TOKENS[:100], 7, val_rows)
    predicted = {name: stacked(part)[:, 1:] for name, part in parts.items()}
    assert all((np.diff(stacked(part), axis=1) == 1).all() for part in parts.values())
    assert {name: len(part) for name, part in parts.items()} == lengths
    assert {name: len(part.rows) for name, part in parts.items()} == rows
    assert not set(predicted["train"].flat) & set(predicted["val"].flat)
    for name, part in parts.items():
        in_rows = part.rows[:][:, 1:]
        assert len(set(in_rows.flat)) == in_rows.size
        assert set(in_rows.flat) <= set(predicted[name].flat)


@pytest.mark.parametrize(
    ("tokens", "val_rows", "message"),
    [
        (TOKENS[:60], None, "--text: .* its val part has 6 tokens"),
        (TOKENS, 14, "--val-rows: .*14$"),
    ],
)
def test_a_text_that_is_too_short_is_refused(tokens, val_rows, message):
    with pytest.raises(CommandLineError, match=message):
        split(tokens, 7, val_rows)


def test_rows_to_validate_on_are_drawn_from_the_whole_text():
    """They include the row at the end of the text, and are the same each time."""
    parts = split(TOKENS, 4, 9)
    starts = np.concatenate([parts["val"][:][:, 0], parts["train"][:][:, 0]])
    assert sorted(starts) == list(range(0, 100, 4))
    assert list(starts) != sorted(starts)
    assert max(parts["val"].starts) > 48 > min(parts["val"].starts)
    np.testing.assert_array_equal(split(TOKENS, 4, 9)["val"][:], parts["val"][:])


@pytest.mark.parametrize("val_rows", [None, 5])
def test_batches_are_windows_in_an_order_of_their_seed(val_rows):
    windows = split(TOKENS, 7, val_rows)["train"]
    loader = Batches(windows, batch_size=4, seed=1)
    rows = np.concatenate([loader[i] for i in range(60)])
    assert (np.diff(rows, axis=1) == 1).all()
    epochs = [rows[i : i + len(windows), 0] for i in (0, len(windows))]
    assert all(set(epoch) == set(np.asarray(windows.starts)) for epoch in epochs)
    assert (epochs[0] != epochs[1]).any()
    again = Batches(windows, batch_size=4, seed=1)
    np.testing.assert_array_equal(again[59], loader[59])
    assert (Batches(windows, batch_size=4, seed=2)[0] != loader[0]).any()


def test_a_user_without_a_home_is_asked_for_a_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(CommandLineError, match=r"^--cache: required, because there is no home"):
        default_cache()
