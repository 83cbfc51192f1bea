"""On all pages, links lead somewhere and commands exist. `make docs` runs the Python blocks."""

import contextlib
import functools
import importlib.util
import inspect
import io
import re
from pathlib import Path

import pytest

from docs_site.blocks import ROOT, blocks, differs, run
from jax_models.models.architecture import architectures
from train.command.train import main as train
from train.run.config import PRESETS
from twinscan.__main__ import COMMANDS

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = r"(?:\.venv/bin/)?(twinscan|python -m|make) ([a-z][\w.-]*)"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PACKAGES = {path.parent.name for path in ROOT.glob("*/__main__.py")}
TARGETS = dict(
    re.findall(
        r"^([\w-]+):.*\n\t\$\(BIN\)/python -m (\w+) \S*\s?\$\(ARGS\)", MAKEFILE, re.MULTILINE
    )
)
"""The module that runs for each target of the Makefile that takes ARGS."""


BESIDE = """
hidden = []
shell = hidden.append
"""
PAGE = """
```bash
first
second
```

```python
import dataclasses

@dataclasses.dataclass
class Shown:
    x: "int"

print(Shown(3), hidden)
```

```
Shown(x=5) ['first', 'second']
```

```python
import matplotlib.pyplot as plt
_ = plt.plot([1, 2])
```
"""


def test_the_runner_of_blocks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "page.test.py").write_text(BESIDE)
    first, second = run(page, tmp_path)
    shown = blocks(PAGE)[0].shown
    assert (first.text, first.figures) == ("Shown(x=3) ['first', 'second']\n", [])
    assert differs(shown, first.text) is None
    assert differs(shown, first.text.replace("x", "y")) == shown.strip()
    assert (tmp_path / second.figures[0]).stat().st_size > 1000
    page.write_text(PAGE + "\n```python\nraise KeyError(hidden)\n```\n")
    line = PAGE.count("\n") + 3
    with pytest.raises(RuntimeError, match=f'page.md", line {line}, in <module>(?s:.*)KeyError'):
        run(page, tmp_path)
    page.write_text("```python\nprint(1)\n```\n\n```\none\n```\n")
    with pytest.raises(RuntimeError, match="'one' is shown, but the block prints\n1\n"):
        run(page, tmp_path)
    with pytest.raises(ValueError, match="at the start of a line"):
        blocks(" ```python\n1\n ```\n")


@pytest.mark.slow
def test_the_readme_shows_what_training_prints(capsys, tmp_path):
    """The numbers may differ."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```\n( +step .*?)```", text, flags=re.DOTALL)
    train(["--out", str(tmp_path / "run"), "--num-steps", "2", "--eval-batches", "1"])
    printed = {
        re.sub(r"[\d.e+-]+", "0", line).strip() for line in capsys.readouterr().out.split("\n")
    }
    for line in shown.splitlines():
        assert line == "…" or re.sub(r"[\d.e+-]+", "0", line).strip() in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]*)", text):
        assert (page.parent / target).exists(), target


@functools.cache
def help_of(module):
    printed = io.StringIO()
    try:
        command = importlib.import_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"{module} needs {error.name}")
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command.main(["--help"])
    return printed.getvalue()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.stem not in ("CHANGELOG", "migration")],
    ids=lambda page: page.name,
)
def test_commands_and_their_options_exist(page):
    """`CHANGELOG.md` and `migration.md` also name commands of earlier versions."""
    prose, *parts = re.split(
        r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    lines = [
        line
        for kind, block in zip(parts[::3], parts[1::3], strict=True)
        if kind != "python"
        for line in block.split("\n")
    ]
    lines += re.findall(r"`([^`\n]+)`", prose + "".join(parts[2::3]))
    for line in lines:
        if not (command := re.match(COMMAND, line.strip())):
            continue
        program, name = command.groups()
        if program == "make":
            assert re.search(rf"^{name}:", MAKEFILE, re.MULTILINE), line
            if (name := TARGETS.get(name)) is None:
                continue
        elif program == "twinscan":
            name = COMMANDS[name][0]
        if name in ("parity_tests", "train"):
            name = COMMANDS[name.removesuffix("_tests")][0]
        elif name in PACKAGES:
            name += ".__main__"
        assert importlib.util.find_spec(name), line
        for option in re.findall(r"(?<![\w-])--[\w.-]+", line):
            assert re.search(rf"(?<!\S){re.escape(option)}(?![\w.-])", help_of(name)), line


def model_of(config: type) -> str:
    """The name of a language model, as pages write it."""
    return f"`{config.__name__.removesuffix('Config')}`"


def test_the_page_of_architectures_and_the_changelog_name_every_model():
    """No other page lists all models. Experiments with many presets have a page of their own."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    presets = pages["architectures.md"] + pages["training.md"]
    assert not {name for name in PRESETS if f"`{name.removesuffix('-small')}`" not in presets}
    rows = r"^\| loaded as \|.*\n.*\n((?:\|.*\n)+)"
    [table] = re.findall(rows, pages["architectures.md"], re.MULTILINE)
    loaded = [re.sub(r"\[(.*)\]\(.*\)", r"\1", row.split("|")[1]) for row in table.splitlines()]
    families = {name.strip() for names in loaded for name in names.split(",")}
    assert families == {config.family for config in architectures()}
    for text in table, pages["CHANGELOG.md"]:
        assert not [config for config in architectures() if model_of(config) not in text]


def test_the_guide_to_cpus_lists_the_kernels():
    """Each operator with kernels has a row, with the number of steps from which they run."""
    native = pytest.importorskip("twinscan_native.forms")
    page = (ROOT / "docs" / "guides" / "cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*?`ops\.(\w+)`.* \| (\d+) or more \|", page, re.MULTILINE)
    modules = {name: form.pays.__module__ for name, (form,) in native.FORMS.items()}
    least = {name: importlib.import_module(module).MIN_STEPS for name, module in modules.items()}
    assert rows == [(name, str(steps)) for name, steps in least.items()]


# A model is recurrent if its source has either of these: its state cannot go back to an earlier
# token, or some layers need a mask of padding because they do not attend. MiniMax, LFM2 and Inkling
# lack the first, and RWKV, Mamba, xLSTM and RecurrentGemma the second.
RECURRENT = "_is_stateful = True", "create_recurrent_attention_mask"
NOT_RECURRENT = {"deepseek_v4": "its state cannot go back because it holds compressed keys"}


def test_the_table_of_recurrent_models_in_transformers_is_complete():
    """A recurrent model that transformers adds is noticed. Sources are read, but not imported."""
    pytest.importorskip("transformers")
    from transformers.models.auto import configuration_auto, modeling_auto

    folder = Path(inspect.getfile(modeling_auto)).parents[1]
    configs = {name: config for config in architectures() for name in config.model_types}
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    rows = []
    for name in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_RECURRENT):
        module = folder / configuration_auto.model_type_to_module_name(name)
        sources = [file.read_text(encoding="utf-8") for file in module.glob("modeling_*.py")]
        if not any(mark in source for mark in RECURRENT for source in sources):
            continue
        if config := configs.get(name):
            since = [text.split()[0] for text in versions if model_of(config) in text]
            rows.append(f"| `{name}` | {config.family} | {since[-1]} |\n")
        else:
            rows.append(f"| `{name}` | not yet |  |\n")
    page = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| `model_type` \|.*\n.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table == "".join(rows)
