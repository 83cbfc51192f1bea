"""Builds the site in `build/docs/html`: `python -m docs_site`.

Warnings are errors. With `--links`, the links to other sites are checked instead.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence

from sphinx.cmd.build import main as sphinx

from docs_site.blocks import PROCESSES, ROOT
from docs_site.pages import gather, navigation

BUILD = ROOT / "build" / "docs"
# The pages show results, and no times. Without optimizing, XLA takes a sixth of the time.
QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib") < "0.11":  # later versions have no such flag
    QUICK += ["--xla_cpu_use_fusion_emitters=false"]
ENVIRONMENT = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "MPLBACKEND": "agg",
    "XLA_FLAGS": " ".join(QUICK),
}
PRELOADED = ["flax.nnx", "jax_models.importers", "parity_tests.report", "torch"]
"""What most pages import. None of these modules starts a thread, which a fork would not copy, or
reads the entry points of other packages, to which a page may add its own."""


def summary(pages: dict[str, str]) -> str:
    """The text of `llms.txt`: the pages in the order of the navigation, with what each is about."""
    lines = ["# twinscan", "", f"> {_first_sentence(pages['README.md'])}", ""]
    for title, names in navigation(pages).items():
        lines += [f"## {title}", ""]
        for name in names:
            place = f"{name}.md" if f"{name}.md" in pages else f"{name}.html"
            text = pages.get(place, "")
            heading = re.search(r"^# (.*)$", text, re.MULTILINE)
            lines.append(
                f"- [{heading[1] if heading else title}]({place}): {_first_sentence(text)}"
            )
        lines.append("")
    return "\n".join(lines)


def _first_sentence(page: str) -> str:
    """The first sentence of a page's first paragraph, without links."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if re.match(r"[\w`\"*\[]", p.strip())]
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    first = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", first)
    return re.split(r"(?<=[.:]) (?=[A-Z`])", first)[0]


def main(args: Sequence[str] | None = None) -> int:
    """Gathers the pages, runs Sphinx on them, and adds `llms.txt`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs_site", description=__doc__)
    parser.add_argument("--links", action="store_true", help="check the links to other sites")
    links = parser.parse_args(args).links
    start = time.perf_counter()
    os.environ |= ENVIRONMENT
    PROCESSES.set_forkserver_preload(PRELOADED)
    pages = gather(BUILD / "source", BUILD / "outputs")
    html = BUILD / "html"
    places = [str(BUILD / "source"), str(BUILD / "links" if links else html)]
    options = ["-c", str(ROOT / "docs_site"), "-d", str(BUILD / "doctrees"), "--jobs", "2"]
    builder = "linkcheck" if links else "html"
    code = sphinx(["-b", builder, "-W", "-n", "--keep-going", "-q", *options, *places])
    if code == 0 and not links:
        # What reads `llms.txt` gets the pages as Markdown, beside those for a browser.
        for place in pages:
            if place.endswith(".md"):
                shutil.copy(BUILD / "source" / place, html / place)
        shutil.copy(html / "README.html", html / "index.html")
        (html / "llms.txt").write_text(summary(pages), encoding="utf-8")
        seconds = time.perf_counter() - start
        print(f"{len(pages)} pages in {html.relative_to(ROOT)}, {seconds:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
