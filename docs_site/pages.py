"""Gathers the pages of the site, with what their code prints, in a folder that Sphinx reads."""

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from docs_site import reference
from docs_site.blocks import ROOT, Output, blocks, run, test_file
from docs_site.proved import proved
from docs_site.results import PLACE, results

GUIDES = [
    "from_lstm",
    "debug_a_port",
    "is_it_a_bug",
    "reinforcement_learning",
    "one_contract",
    "your_own",
    "which_layer",
    "pretrained",
    "cpu",
    "tpus",
    "long_convolutions",
    "records",
    "export",
]
"""The order of the guides. Guides that are not listed come last."""
PARTS = {
    "Guides": ["docs/guides/*"],
    "Examples": ["docs/examples/*"],
    "Reference": [
        "reference/index",
        "reference/command_line",
        "proved",
        "benchmarks/results/README",
    ],
    "More": ["docs/*"],
    "Design": ["docs/design/*"],
    "Project": ["CHANGELOG", "CONTRIBUTING"],
}
"""The parts of the navigation, and their pages. `*` stands for all pages of a folder that no other
part names."""
TOP = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
"""Pages outside `docs/`."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")


def sources() -> list[str]:
    """The places of the written pages, which are those that they have in the repository."""
    return [*TOP, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def gather(folder: Path, cache: Path) -> dict[str, str]:
    """Writes the pages and the files that they refer to, and returns the pages' texts by place."""
    # The reference sets variables of the environment for a while, so it is made before the threads.
    pages = reference.pages() | {"proved.md": proved(), PLACE: results()}
    shutil.rmtree(folder, ignore_errors=True)
    # A long page that started last would keep one core busy while the others wait.
    places = sorted(sources(), key=lambda place: (ROOT / place).stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each page runs in a process of its own
        found = {place: pool.submit(_outputs, ROOT / place, cache) for place in places}
    for place, outputs in found.items():
        text = (ROOT / place).read_text(encoding="utf-8")
        pages[place] = _with_outputs(text, *outputs.result(), (folder / place).parent)
    for title, members in navigation(pages).items():
        names = "\n".join(members)
        pages["README.md"] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n"
    for place, text in pages.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_links(text, place, folder), encoding="utf-8")
    return pages


def navigation(places: Iterable[str]) -> dict[str, list[str]]:
    """The pages that each part of the navigation holds, without their suffixes."""
    pages = [str(PurePosixPath(place).with_suffix("")) for place in places]
    named = {name for names in PARTS.values() for name in names}
    parts = {}
    for title, patterns in PARTS.items():
        parts[title] = []
        for pattern in patterns:
            folder = PurePosixPath(pattern).parent
            found = [p for p in pages if PurePosixPath(p).parent == folder and p not in named]
            parts[title] += sorted(found, key=_order) if "*" in pattern else [pattern]
    return parts


def _order(place: str) -> tuple[int, str]:
    """Sorts the index of a folder first, guides in the order of `GUIDES`, other pages by name."""
    order = ["index", *GUIDES]
    stem = PurePosixPath(place).stem
    return order.index(stem) if stem in order else len(order), place


def _outputs(page: Path, cache: Path) -> tuple[list[Output], Path]:
    """What the blocks of a page print, and the folder of their figures.

    They run again only if the page or the code of the project has changed.
    """
    text = page.read_bytes()
    if not blocks(text.decode()):
        return [], cache
    if (beside := test_file(page)).exists():
        text += beside.read_bytes()
    folder = cache / hashlib.sha256(text + _digest_of_code()).hexdigest()[:16]
    record = folder / "outputs.json"
    if not record.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outputs = run(page, folder)
        record.write_text(json.dumps([vars(output) for output in outputs]), encoding="utf-8")
    return [Output(**fields) for fields in json.loads(record.read_text(encoding="utf-8"))], folder


@functools.cache
def _digest_of_code() -> bytes:
    digest = hashlib.sha256()
    for package in (*reference.OWN, "docs_site"):
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.digest()


def _with_outputs(text: str, outputs: list[Output], figures: Path, folder: Path) -> str:
    """A page with what each block prints and draws below the block."""
    parts, start = [], 0
    for block, output in zip(blocks(text), outputs, strict=True):
        parts.append(text[start : block.end])
        start = block.end
        if output.text.strip() and block.shown is None:
            directive = "{code-block} text\n:class: output"
            parts.append(f"\n\n````{directive}\n\n{output.text.rstrip()}\n````")
        for figure in output.figures:
            _copy(figures / figure, folder / figure)
            parts.append(f"\n\n![What the block draws]({figure})")
    return "".join([*parts, text[start:]])


def _with_links(text: str, place: str, folder: Path) -> str:
    """A page whose links to folders lead to the pages in them. The files it links to are copied."""

    def target(match: re.Match[str]) -> str:
        path = (ROOT / place).parent / match[0]
        if path.is_dir():
            return f"{match[0]}/README.md"
        if path.is_file() and path.suffix != ".md":
            _copy(path, folder / path.resolve().relative_to(ROOT))
        return match[0]

    return LINK.sub(target, text)


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)
