"""A process keeps freed memory only if it has asked to."""

import os
import runpy
import subprocess
import sys

import pytest

import jax_models
from benchmarks.environment import without_malloc

CODE = """
from benchmarks.environment import keeps_memory
import jax_models
from jax_models import allocator
{change}
before = keeps_memory()
print(before, jax_models.tune_allocator(), keeps_memory())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ("", "False True True\n"),
        ("allocator.library_of = {allocator.ALLOCATE: 'jemalloc.so.2'}.get", "False False False\n"),
    ],
    ids=["glibc", "a preloaded malloc"],
)
def test_memory_is_kept_from_the_call_on_and_not_from_the_import(change, printed):
    """A malloc that the user has preloaded is not changed."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(change=change)],
        capture_output=True,
        text=True,
        check=True,
        env=without_malloc(os.environ),
    )
    assert done.stdout == printed


@pytest.mark.parametrize(
    "command", ["train", *(f"train.command.{name}" for name in ("generate", "evaluate", "export"))]
)
def test_commands_tune_before_anything_else(monkeypatch, capsys, command):
    calls = []
    monkeypatch.setattr(jax_models, "tune_allocator", lambda: calls.append(command))
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.delitem(
        sys.modules, command if "." in command else "train.command.train", raising=False
    )
    with pytest.raises(SystemExit):
        runpy.run_module(command, run_name="__main__")
    assert calls == [command]


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not jax_models.tune_allocator()
