"""Checkpoints on faulty disks: all damage is named, and the previous checkpoint is used."""

import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from train.run.checkpoints import Checkpoints, _difference
from twinscan.command_line import CommandLineError

NEWEST = 3


def state(step: int) -> dict:
    x = np.random.default_rng(step).standard_normal((40, 30), np.float32)
    return {"weights": jnp.asarray(x), "moments": [jnp.asarray(x[0]), jnp.int32(step)]}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A folder with three checkpoints, of which the first has the lowest loss."""
    folder = tmp_path_factory.mktemp("written")
    checkpoints = Checkpoints(folder)
    for step in range(NEWEST + 1):
        checkpoints.save(step, state(step), loss=abs(step - 1.0))
    checkpoints.close()
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "copy")


def flipped(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "lost": Path.unlink,
    "flipped": lambda path: flipped(path, random.Random(0).randrange(8 * path.stat().st_size)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "foreign": lambda path: path.with_name("foreign").write_bytes(b"foreign"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(damage, folder, written):
    files = [path for path in (folder / str(NEWEST)).rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        if path.stat().st_size == 0 and damage in ("cut", "flipped"):
            continue
        if path.name == "manifest.json" and damage == "foreign":
            continue
        DAMAGES[damage](path)
        checkpoints = Checkpoints(folder)
        assert checkpoints.latest_step == NEWEST - 1, path
        name = "foreign" if damage == "foreign" else path.name
        assert name in checkpoints.damaged[NEWEST]
        chex.assert_trees_all_equal(checkpoints.restore(state(0)), state(NEWEST - 1))
        shutil.rmtree(folder)
        shutil.copytree(written, folder)


def test_another_checkpoint_under_its_name_is_noticed(folder, tmp_path):
    """The other one is an earlier checkpoint of the run, or one of another run."""
    (tmp_path / "another").mkdir()
    another = Checkpoints(tmp_path / "another", "another")
    another.save(NEWEST, state(NEWEST), loss=0.5)
    another.close()
    for source, fault in (
        (folder / "2", "step: expected 3, got 2"),
        (another.folder / "3", "run: expected , got another"),
    ):
        shutil.rmtree(folder / str(NEWEST))
        shutil.copytree(source, folder / str(NEWEST))
        checkpoints = Checkpoints(folder)
        assert checkpoints.latest_step == NEWEST - 1
        assert checkpoints.damaged == {NEWEST: fault}


def test_a_reader_while_older_ones_are_removed(folder, monkeypatch):
    """It reads the newer checkpoints instead, and does not call any of them damaged."""
    reader, restore, compare = Checkpoints(folder), ocp.PyTreeCheckpointer.restore, _difference

    def save(*steps: int) -> None:
        monkeypatch.undo()
        writer = Checkpoints(folder)
        for step in steps:
            writer.save(step, state(step), loss=0.0)
        writer.close()

    def save_and_compare(*args):  # after the manifest is read, and before the files are
        save(4, 5, 6)
        monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", save_and_restore)
        return compare(*args)

    def save_and_restore(*args, **kwargs):
        save(7, 8, 9)
        return restore(*args, **kwargs)

    monkeypatch.setattr("train.run.checkpoints._difference", save_and_compare)
    chex.assert_trees_all_equal(reader.restore(state(0)), state(9))
    assert not reader.damaged


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (lambda s: s | {"weights": s["weights"][:3]}, "weights:"),
        (lambda s: s | {"weights": s["weights"].astype(jnp.bfloat16)}, "weights:"),
        (lambda s: s | {"more": s["weights"]}, "more is missing"),
        (lambda s: {"weights": s["weights"]}, r"moments\.0 does not belong to it"),
    ],
)
def test_a_state_of_another_model_is_refused(other, fault, written):
    """An earlier version may have written it, so nobody is told that the file is damaged."""
    checkpoints = Checkpoints(written)
    message = rf"/{NEWEST}: the checkpoint is intact, but has other arrays than .*: {fault}"
    with pytest.raises(CommandLineError, match=message):
        checkpoints.restore(other(state(0)))
    assert not checkpoints.damaged


def test_only_the_selected_part_is_read(folder, monkeypatch):
    read, restore = [], ocp.PyTreeCheckpointer.restore

    def restore_and_record(*args, **kwargs):
        read.append(restore(*args, **kwargs))
        return read[-1]

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", restore_and_record)
    found = Checkpoints(folder).restore(state(0), part=lambda state: state["moments"][1:])
    chex.assert_trees_all_equal(found, state(NEWEST)["moments"][1:])
    assert [array for array in jax.tree.leaves(read) if array is not ocp.PLACEHOLDER] == found


def test_a_damaged_checkpoint_is_written_again(folder):
    (folder / str(NEWEST) / "manifest.json").unlink()
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_step == NEWEST - 1
    checkpoints.save(NEWEST, state(NEWEST), loss=0.5)
    checkpoints.close()
    assert Checkpoints(folder).latest_step == NEWEST
    assert Checkpoints(folder).steps == [1, 2, 3]


STRANGERS = {
    "a file": lambda path: path.touch(),
    "an empty folder": lambda path: path.mkdir(),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_checkpoint_is_named_and_replaced(stranger, folder):
    for name in ("7", "4.partial", "x.partial", "0099"):
        STRANGERS[stranger](folder / name)
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_step == NEWEST
    assert checkpoints.damaged.keys() == {7}
    checkpoints.clean()
    for step in (4, 7):
        checkpoints.save(step, state(step), loss=9.0)
    checkpoints.close()
    assert Checkpoints(folder).steps == [1, 4, 7]
    assert not [*folder.glob("*.partial")]


def test_a_checkpoint_that_is_evaluated_after_it_was_written_can_be_the_best(tmp_path):
    """A run writes its first checkpoint before its first evaluation."""
    for saved in ([(0, None), (0, 1.0)], [(2, 2.0), (3, 3.0), (4, 4.0)]):
        checkpoints = Checkpoints(tmp_path)
        for step, loss in saved:
            checkpoints.save(step, state(step), loss)
        checkpoints.close()
    assert Checkpoints(tmp_path).steps == [0, 3, 4]


def test_a_write_that_ends_after_orbax_gave_up_is_not_reported(folder, monkeypatch):
    """On a full disk, orbax raises the first error, and later writes find its event loop closed."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    checkpoints = Checkpoints(folder)
    checkpoints.save(NEWEST + 1, state(NEWEST + 1), loss=0.0)
    checkpoints.close()
    for message in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(message)))
    assert [str(each.exc_value) for each in reported] == ["another"]


def test_a_checkpoint_behind_a_link_goes_as_any_other(folder, tmp_path):
    elsewhere = (folder / "2").rename(tmp_path / "elsewhere")
    (folder / "2").symlink_to(elsewhere)
    checkpoints = Checkpoints(folder)
    checkpoints.save(4, state(4), loss=9.0)
    checkpoints.close()
    assert Checkpoints(folder).steps == [1, 3, 4]
    assert elsewhere.exists()
