"""Files are written completely or not at all."""

import os
import signal
import subprocess
import sys

import pytest

from twinscan.files import check_writable, write_whole

WRITES_UNTIL_IT_IS_KILLED = """
import itertools, pathlib, sys
from twinscan.files import check_writable, write_whole
path = pathlib.Path("record.json")
for i in itertools.count():
    check_writable(path)
    write_whole(path, str(i % 10) * 1_000_000)
    print(flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_a_whole_file(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES_UNTIL_IT_IS_KILLED], cwd=tmp_path, stdout=subprocess.PIPE
    )
    for _ in range(20):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    text = (tmp_path / "record.json").read_text()
    assert text == text[0] * 1_000_000


def test_a_text_that_cannot_be_written_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "record.json"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert path.read_text() == "before"


def test_a_check_neither_creates_nor_changes_a_file(tmp_path):
    (tmp_path / "there").write_text("before")
    for name in ("there", "new", 240 * "x"):
        check_writable(tmp_path / name)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    link.symlink_to(file)
    write_whole(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("", IsADirectoryError),
        ("none/file", FileNotFoundError),
        (250 * "x", OSError),  # the name of the temporary file would be too long
    ],
)
def test_what_cannot_be_written_is_refused_and_not_made(tmp_path, name, error):
    (tmp_path / "file").touch()
    for write in (check_writable, lambda path: write_whole(path, "")):
        with pytest.raises(error):
            write(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
