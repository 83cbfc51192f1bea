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
from docs_site.results import RECORDS, results

DOCS = ROOT / "docs"
GUIDES = [
    "from_lstm",
    "debug_a_port",
    "is_it_a_bug",
    "reinforcement_learning",
    "one_contract",
    "your_own",
    "which_layer",
    "pretrained",
    "tpus",
    "long_convolutions",
    "records",
    "export",
]
"""The order of the guides. Guides that are not listed come last."""
PARTS = {
    "Guides": ["guides/*"],
    "Examples": ["examples/*"],
    "Reference": ["reference/index", "reference/command_line", "proved", "results"],
    "More": ["*"],
    "Design": ["design/*"],
    "Project": ["changelog", "contributing"],
}
"""The parts of the navigation, and their pages. `*` stands for all pages of a folder that no other
part names."""
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages outside `docs/`, and their places on the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, Path]:
    """The written pages, by their places on the site."""
    found = {place: ROOT / name for name, place in TOP.items()}
    found |= {str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md"))}
    return found


def gather(folder: Path, cache: Path) -> dict[str, str]:
    """Writes the pages and the files that they refer to, and returns the pages' texts by place."""
    written = sources()
    places = {path: place for place, path in written.items()} | {RECORDS: "results.md"}
    generated = reference.pages() | {"proved.md": proved()}  # which sets variables for a while
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each page runs in a process of its own
        found = [pool.submit(_outputs, path, cache) for path in written.values()]
    pages = {}
    for (place, path), outputs in zip(written.items(), found, strict=True):
        text = _with_links(path.read_text(encoding="utf-8"), path, place, places, folder)
        pages[place] = _with_outputs(text, *outputs.result(), place, folder)
    pages |= generated
    pages["results.md"] = _with_links(
        results(), RECORDS / "README.md", "results.md", places, folder
    )
    parts = navigation(pages)
    for title, members in parts.items():
        names = "\n".join(place.removesuffix(".md") for place in members)
        pages["index.md"] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n"
    for place, text in pages.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    for old in folder.rglob("*.md"):
        if str(PurePosixPath(old.relative_to(folder))) not in pages:
            old.unlink()
    return pages


def navigation(pages: Iterable[str]) -> dict[str, list[str]]:
    """The places of the pages that each part of the navigation holds, without empty parts."""
    named = {f"{name}.md" for names in PARTS.values() for name in names} | {"index.md"}
    parts = {}
    for title, patterns in PARTS.items():
        members = []
        for pattern in (f"{name}.md" for name in patterns):
            if "*" not in pattern:
                members.append(pattern)
            else:
                folder = PurePosixPath(pattern).parent
                found = [p for p in pages if PurePosixPath(p).parent == folder and p not in named]
                members += sorted(found, key=_order)
        if members:
            parts[title] = members
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


def _with_outputs(text: str, outputs: list[Output], figures: Path, place: str, folder: Path) -> str:
    """A page with what each block prints and draws below the block."""
    parts, start = [], 0
    for block, output in zip(blocks(text), outputs, strict=True):
        parts.append(text[start : block.end])
        start = block.end
        if output.text.strip() and block.shown is None:
            directive = "{code-block} text\n:class: output"
            parts.append(f"\n\n````{directive}\n\n{output.text.rstrip()}\n````")
        for figure in output.figures:
            copy = _copied(figures / figure, place, folder)
            parts.append(f"\n\n![What the block draws]({copy})")
    return "".join([*parts, text[start:]])


def _copied(file: Path, place: str, folder: Path) -> str:
    """Copies a file to the site, and returns its place relative to a page."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / "files" / file.name)
    return os.path.relpath(f"files/{file.name}", PurePosixPath(place).parent)


def _module(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT).parts)


def _with_links(text: str, page: Path, place: str, places: dict[Path, str], folder: Path) -> str:
    """A page whose links lead to pages of the site, or to copies of files of the project."""

    def target(match: re.Match[str]) -> str:
        path, anchor = (page.parent / match[1]).resolve(), match[2] or ""
        if (to := places.get(path)) is None and path.is_dir():  # a package
            to, anchor = f"reference/{reference.group_of(_module(path))}/{path.name}.md", ""
        elif to is None:
            return _copied(path, place, folder)
        return os.path.relpath(to, PurePosixPath(place).parent) + anchor

    def outside_code(piece: str) -> str:
        return LINK.sub(target, piece)

    pieces, start = [], 0
    for code in CODE.finditer(text):
        pieces += [outside_code(text[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*pieces, outside_code(text[start:])])
