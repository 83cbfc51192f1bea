"""Saves the files of the page, installs the package as `pip install -e .` would, and runs it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("your_own.md").read_text(encoding="utf-8")
Path("mgu").mkdir()
Path("mgu/__init__.py").touch()
for name, text in re.findall(r"^```\w+\n# (\S+\.(?:py|toml))\n(.*?)^```$", PAGE, re.M | re.S):
    Path(name).write_text(text, encoding="utf-8")
groups = re.findall(r'^\[project\.entry-points\."(.*)"\]\n(.*) = "(.*)"$', PAGE, re.M)
assert len(groups) == 3
Path("mgu-1.0.dist-info").mkdir()
Path("mgu-1.0.dist-info/METADATA").write_text("Name: mgu\nVersion: 1.0\n")
Path("mgu-1.0.dist-info/entry_points.txt").write_text(
    "".join(f"[{group}]\n{name} = {module}\n" for group, name, module in groups)
)
Path("input.txt").write_text("To be, or not to be, that is the question.\n" * 50)
sys.path.insert(0, os.getcwd())

EXPECTED = {
    "twinscan parity": "planted faults: 2 of 2 caught",
    "twinscan train": "errors of the float32 logits against the float64 twin",
    "twinscan generate": "To be",
    "twinscan export": "",
    "pytest test_mgu.py": "passed",
}
QUICK = {
    "twinscan train": "--num-steps 4 --window 12 --eval-batches 1 --optimizer.warmup-steps 0",
    "pytest test_mgu.py": "-p no:cacheprovider",
}


def shell(line: str) -> None:
    """Runs a command in fewer steps, and checks what it prints."""
    command = " ".join(line.split()[:2])
    module, *arguments = shlex.split(f"{line} {QUICK.get(command, '')}")
    paths = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXPECTED[command] in done.stdout
