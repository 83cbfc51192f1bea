"""The README's Python runs, in its order, in one namespace."""

import re
from pathlib import Path

import jax
import torch

import torch_ref

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch_ref.RWKVLanguageModel(30, 8, 2, 32).state_dict(), "RWKV-4-Pile-169M.pth")
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 5
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):  # flax's norm needs it
        for block in blocks:
            exec(block, namespace)
    assert namespace["y"].shape == (8, 20, 128)
    assert namespace["logits"].shape == (8, 20, 5)
    assert namespace["token_logits"].shape == (1, 3, 30)
    assert namespace["tokens"].shape == (1, 20)
    assert str(namespace["report"]).endswith("first to depart: 0")


def test_the_readme_counts_the_cases():
    from parity_tests.registry import CASES

    assert f"each of the {len(CASES)} twin pairs" in README
