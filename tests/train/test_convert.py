"""`twinscan convert` writes another layout or dtype, completely or not at all."""

import contextlib
import json
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import train.convert as command
from jax_models import (
    GriffinLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    RWKVLanguageModelConfig,
    load_pretrained,
    to_torch,
)
from twinscan.command_line import CommandLineError

GRIFFIN = GriffinLanguageModelConfig(
    vocab_size=12, features=8, num_layers=3, recurrent_features=8, mlp_features=6, num_heads=2,
    window=5, logits_soft_cap=7.0,
)  # fmt: skip
RWKV = RWKVLanguageModelConfig(vocab_size=12, features=8, num_layers=3, hidden_features=16)


def random_weights(config, layout):
    """Sets all parameters to random values. Tied ones stay equal."""
    rng = np.random.default_rng(0)
    weights = to_torch(config.build(rngs=nnx.Rngs(0)), layout)
    return {k: rng.standard_normal(w.shape).astype(w.dtype) for k, w in weights.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A RecurrentGemma of transformers, with a tokenizer and a config field that we do not know."""
    monkeypatch.chdir(tmp_path)
    folder = Path("griffin")
    folder.mkdir()
    save_file(random_weights(GRIFFIN, "hf-file"), folder / "model.safetensors")
    config = GRIFFIN.to_hf() | {"eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(*args):
    command.main([str(arg) for arg in args])


def test_there_and_back_bit_for_bit(folder, capsys):
    convert("--from", folder, "--to", "d.safetensors", "--layout", "deepmind")
    assert (
        capsys.readouterr().out
        == "d.safetensors: GriffinLanguageModel in layout deepmind, 0.0 MB\n"
    )
    assert "embedder.input_embedding" in load_file("d.safetensors")
    convert("--from", "d.safetensors", "--to", "t.pth", "--layout", "deepmind-torch")
    convert("--from", "t.pth", "--to", "back", "--layout", "hf")
    before, after = (load_file(f / "model.safetensors") for f in (folder, Path("back")))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert after[key].tobytes() == array.tobytes(), key


def test_the_config_and_the_tokenizer_come_along(folder):
    convert("--from", folder, "--to", "other", "--layout", "hf", "--param-dtype", "bfloat16")
    config = json.loads(Path("other/config.json").read_text())
    assert config == GRIFFIN.to_hf() | {"eos_token_id": 3, "dtype": "bfloat16"}
    assert GriffinLanguageModelConfig.from_hf(config) == GRIFFIN
    assert Path("other/tokenizer.json").read_text() == "{}"
    weights = load_file(folder / "model.safetensors")
    for key, array in to_torch(load_pretrained("other"), "hf-file").items():
        assert array.tobytes() == weights[key].astype(jnp.bfloat16).tobytes(), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_all_floating_weights_get_the_dtype_of_a_run(dtype):
    """Also those that are not trained, such as HyenaDNA's positions, and without JAX's x64."""
    config = HyenaDNALanguageModelConfig(context_length=32, features=8, mlp_features=9)
    model = command.with_param_dtype(config.build(rngs=nnx.Rngs(0)), dtype)
    assert {str(array.dtype) for array in to_torch(model).values()} == {dtype}


def test_large_weights_are_written_in_parts(folder, monkeypatch):
    monkeypatch.setattr(command, "MOST", 2000)
    convert("--from", folder, "--to", "parts", "--layout", "hf")
    index = json.loads(Path("parts/model.safetensors.index.json").read_text())["weight_map"]
    assert {*index.values()} == {path.name for path in Path("parts").glob("*.safetensors")}
    assert len({*index.values()}) > 2
    assert max(path.stat().st_size for path in Path("parts").glob("*.safetensors")) < 5000
    before, after = (to_torch(load_pretrained(each)) for each in (folder, "parts"))
    for key, array in before.items():
        assert after[key].tobytes() == array.tobytes(), key


@pytest.mark.slow
@pytest.mark.parametrize("config", [GRIFFIN, RWKV], ids=["Griffin", "RWKV-4"])
def test_transformers_loads_what_is_written(config, tmp_path, monkeypatch):
    """Its own `from_pretrained` loads it strictly, and the logits are equal."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    source = "deepmind" if config is GRIFFIN else "blinkdl"
    weights = random_weights(config, source)
    weights = {key: w if w.ndim > 1 else 0.1 * w for key, w in weights.items()}
    save_file(weights, "a.safetensors")
    convert("--from", "a.safetensors", "--to", "hf", "--layout", "hf")
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        "hf", output_loading_info=True, **({"rescale_every": 0} if config is RWKV else {})
    )
    assert not any(report.values()), report
    tokens = np.arange(5)[None]
    with torch.no_grad():
        theirs = read.eval()(torch.tensor(tokens), use_cache=False).logits.numpy()
    ours = np.asarray(load_pretrained("hf")(tokens)[0])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_what_cannot_be_written_is_refused(folder):
    Path("there").mkdir()
    for args, message in (
        (("--to", "there"), "--to: there exists"),
        (("--to", "new", "--layout", "gguf"), r"--layout: GriffinLanguageModel .* not 'gguf'"),
        (("--to", "nowhere/a.safetensors"), "nowhere"),
        (("--to", "new", "--param-dtype", "int8"), "param.dtype"),
    ):
        with pytest.raises(CommandLineError, match=message):
            convert("--from", folder, *args)
    with pytest.raises(CommandLineError, match="no-such-folder: No such file or directory"):
        convert("--from", "no-such-folder", "--to", "new")
    assert sorted(path.name for path in Path().iterdir()) == ["griffin", "there"]


@contextlib.contextmanager
def full_disk():
    """Limits files to 1000 bytes. Meanwhile, JAX does not write compiled programs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", np.inf)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)


@pytest.mark.parametrize("target", ["new", "new.safetensors", "new.pth"])
def test_a_write_that_fails_leaves_nothing(folder, target):
    with pytest.raises(CommandLineError, match=f"^{target}: File too large$"), full_disk():
        convert("--from", folder, "--to", target, "--layout", "hf")
    assert [path.name for path in Path().iterdir()] == ["griffin"]
