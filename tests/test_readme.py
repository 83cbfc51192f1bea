"""The README's Python runs, in its order, in one namespace."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["logits"].shape == (8, 20, 5)
    assert namespace["y"].shape == (8, 20, 128)


def test_the_readme_counts_the_cases():
    from parity_tests.cases import CASES

    assert f"each of the {len(CASES)} twin pairs" in README
