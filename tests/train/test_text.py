"""A text as tokens, parts, rows and batches."""

import pwd

import numpy as np
import pytest

from train.text import default_cache
from train.vocabulary import Characters
from train.windows import Batches, Windows, split
from twinscan.command_line import CommandLineError

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


def test_rows_to_validate_on_are_drawn_from_the_whole_text():
    """All rows, also one that ends with the text; the same rows each time."""
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


def test_every_character_is_a_token():
    text = "añ\U0001f600b\r\n\t"
    vocabulary = Characters.of(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary) == len(set(text))


def test_a_user_without_a_home_is_asked_for_a_cache(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(CommandLineError, match=r"^--cache: required, because there is no home"):
        default_cache()
