"""Every block of Python in the README and on the pages of docs/ runs on its own."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file

import torch_ref
from jax_models import (
    GriffinLanguageModelConfig,
    HippogriffLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    RWKV7LanguageModelConfig,
    to_torch,
)
from jax_models.models.architecture import architectures
from train.__main__ import main as train
from train.config import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name} {i}": block
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
}
NEEDED = {
    "flatbuffers": ".serialize()",
    "keras": "import keras",
    "onnx": "import onnx",
    "silero_vad": '("silero-vad")',
}
"""Optional packages, and the text by which a block shows that it needs one."""


def save_recurrentgemma(folder: Path) -> None:
    """Saves a small RecurrentGemma with transformers."""
    sizes = {"vocab_size": 30, "num_attention_heads": 2, "hidden_size": 8, "lru_width": 8}
    config = {"model_type": "recurrent_gemma", "num_hidden_layers": 3, "num_key_value_heads": 1}
    config |= sizes | {"intermediate_size": 12}
    model = GriffinLanguageModelConfig.from_hf(config).build(
        param_dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(to_torch(model, "hf-file"), folder / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("README") else pytest.mark.slow)
        for name in BLOCKS
    ],
)
def test_a_block_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch_ref.RWKVLanguageModel(30, 8, 2, 32).state_dict(), "RWKV-4-Pile-169M.pth")
    small = RWKV7LanguageModelConfig(vocab_size=30, features=8, num_layers=2, head_size=4)
    rwkv7 = torch_ref.RWKV7LanguageModel.from_config(small)
    torch.save(rwkv7.state_dict(), "RWKV-x070-World-0.1B.pth")
    dna = HyenaDNALanguageModelConfig(context_length=32, features=8, mlp_features=9)
    torch.save(torch_ref.HyenaDNALanguageModel.from_config(dna).state_dict(), "hyenadna.pth")
    hippogriff = HippogriffLanguageModelConfig(vocab_size=30, features=16, num_kv_heads=2)
    torch.save(
        torch_ref.HippogriffLanguageModel.from_config(hippogriff).state_dict(), "hippogriff.pth"
    )
    save_recurrentgemma(tmp_path / "recurrentgemma-2b")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for package, sign in NEEDED.items():
        if sign in BLOCKS[name] and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # Run the block as in a user's program, with JAX's default promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(BLOCKS[name], {"__name__": "block"})


@pytest.mark.slow
def test_the_blocks_on_sharding_run_on_eight_devices():
    """Runs in another process, because the number of devices must be set before JAX starts."""
    blocks = [
        block
        for name, block in BLOCKS.items()
        if name.startswith("sharding.md") and "jax.export" not in block
    ]
    code = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n' + "\n".join(blocks)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), flags=re.MULTILINE)
    assert done.stdout.splitlines() == comments


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


def test_the_pages_name_every_architecture():
    """The README and the page on training name presets, the page on weights names families."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    presets = pages["README.md"] + pages["training.md"]
    assert not {name for name in PRESETS if f"`{name.removesuffix('-small')}`" not in presets}
    known = {config.family for config in architectures() if config.marks or config.model_types}
    [table] = re.findall(r"^\| it reads \|.*\n.*\n((?:\|.*\n)+)", pages["weights.md"], re.MULTILINE)
    assert known == {
        name for row in table.splitlines() for name in row.split("|")[1].strip().split(", ")
    }
