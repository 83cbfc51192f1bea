"""Every block of Python in the README and on the pages of docs/ runs by itself."""

import re
from pathlib import Path

import jax
import pytest
import torch

import torch_ref

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name} {i}": block
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch_ref.RWKVLanguageModel(30, 8, 2, 32).state_dict(), "RWKV-4-Pile-169M.pth")
    with jax.numpy_dtype_promotion("standard"):  # flax's norm needs it
        exec(BLOCKS[name], {"__name__": "block"})


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]*)", text):
        assert (page.parent / target).exists(), target
