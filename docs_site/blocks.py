"""Runs the Python blocks of a page in order, and keeps what they print and draw.

All blocks of a page that begin with ```python share a namespace, in a process of their own. A
figure that a block leaves open is saved. A page may show the output of a block itself, in a fence
without a language directly below the block; in such a fence, `…` stands for any number of lines.

If a page needs more to run as a test, this code is in `page.test.py` beside `page.md`, which runs
first, in the same namespace. If it defines a function `shell`, it receives each line of the blocks
that begin with ```bash.
"""

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROCESSES = multiprocessing.get_context("forkserver")
"""Starts a process for each page. `main` lets it import what most pages import, once for all."""
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page, and where it stands."""

    code: str
    line: int
    end: int
    shown: str | None
    """What the page itself shows as the output, in a fence without a language below the block."""


@dataclasses.dataclass(frozen=True)
class Output:
    """What a block prints, and the files of the figures that it draws."""

    text: str
    figures: list[str]


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    found = [
        Block(
            match["code"],
            page.count("\n", 0, match.start("code")),
            match.end(),
            shown[1] if (shown := SHOWN.match(page, match.end())) else None,
        )
        for match in FENCE.finditer(page)
    ]
    if len(found) != page.count("```python\n"):
        raise ValueError("expected every ```python at the start of a line, and ``` after it")
    return found


def test_file(page: Path) -> Path:
    """The file beside a page with what its blocks need to run as a test."""
    return page.with_suffix(".test.py")


def differs(shown: str, printed: str) -> str | None:
    """The first line of a shown output that was not printed, whatever its numbers, or None."""
    lines = iter([_without_numbers(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        if line.strip() != "…" and _without_numbers(line) not in lines:
            return line
    return None


def _without_numbers(line: str) -> str:
    return " ".join(re.sub(r"-?\d[\d.,]*(e[-+]\d+)?", "0", line).split())


def run(page: Path, folder: Path) -> list[Output]:
    """Runs the blocks of a page in another process, in an empty folder.

    Args:
        page: the path of the page.
        folder: where to save figures.

    Raises:
        RuntimeError: a block fails, and the message ends with its traceback; or a block does not
            print what the page shows.

    """
    log, record = folder / "log.txt", folder / f"{page.stem}.json"
    with tempfile.TemporaryDirectory() as empty:
        process = PROCESSES.Process(target=_run_here, args=(page.resolve(), record, log, empty))
        process.start()
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{page}: a block fails\n{log.read_text(encoding='utf-8')[-4000:]}")
    outputs = [Output(**fields) for fields in json.loads(record.read_text(encoding="utf-8"))]
    for block, output in zip(blocks(page.read_text(encoding="utf-8")), outputs, strict=True):
        line = None if block.shown is None else differs(block.shown, output.text)
        if line is not None:
            raise RuntimeError(f"{page}: {line!r} is shown, but the block prints\n{output.text}")
    return outputs


def _run_here(page: Path, record: Path, log: Path, empty: str) -> None:
    """Runs the blocks of a page in this process, and writes their outputs as JSON."""
    os.chdir(empty)
    os.environ["XDG_CACHE_HOME"] = str(Path(empty) / ".cache")
    with log.open("wb") as file:  # also takes the traceback, and what other processes print
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    text = page.read_text(encoding="utf-8")
    # What looks up a class by the name of its module, such as a dataclass, finds the page.
    module = sys.modules["page"] = ModuleType("page")
    warnings.filterwarnings("error", module="page")
    if (file := test_file(page)).exists():
        module.__file__ = str(file)
        exec(compile(file.read_text(encoding="utf-8"), file, "exec"), vars(module))
    outputs, start = [], 0
    for block in blocks(text):
        _run_commands(text[start : block.end], module)
        start = block.end
        # With the empty lines above, a traceback has the page's own lines and line numbers.
        code = compile("\n" * block.line + block.code, page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, vars(module))
        figures = []
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            for number in pyplot.get_fignums():
                figures.append(f"{page.stem}-{len(outputs)}-{number}.png")
                pyplot.figure(number).savefig(
                    record.with_name(figures[-1]), dpi=160, bbox_inches="tight"
                )
            pyplot.close("all")
        outputs.append(Output(printed.getvalue(), figures))
    _run_commands(text[start:], module)
    fields = json.dumps([*map(dataclasses.asdict, outputs)])
    record.write_text(fields, encoding="utf-8")


def _run_commands(text: str, module: ModuleType) -> None:
    """Passes the shell commands in a piece of a page to the function `shell`, if there is one."""
    if shell := getattr(module, "shell", None):
        for commands in SHELL.findall(text):
            for line in commands.splitlines():
                shell(line)
