"""Files and folders of weights in all formats are read one tensor at a time, or rejected."""

import collections
import json
import shutil
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from published import (
    FAMILIES,
    HIPPOGRIFF,
    HIPPOGRIFF_3,
    HYENA_DNA,
    MODELS,
    RWKV,
    RWKV7,
    assert_same_weights,
    build,
    fields_without_shape,
    initial,
    weights_of,
)
from safetensors.numpy import save_file

from jax_models import Qwen35LanguageModelConfig, SileroVAD, load_pretrained, to_torch


def tensors(weights):
    return {key: torch.from_numpy(array) for key, array in weights.items()}


def safetensors_file(weights, folder):
    save_file(weights, folder / "a.safetensors")
    return folder / "a.safetensors"


def torch_file(weights, folder):
    torch.save(tensors(weights), folder / "a.pth")
    return folder / "a.pth"


def old_torch_file(weights, folder):
    torch.save(tensors(weights), folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


def turned(tensor):
    """Reverses the axes of a tensor."""
    return tensor.permute(*reversed(range(tensor.ndim)))


def views_in_a_torch_file(weights, folder):
    """Writes tensors that are transposed views of parts of larger storages."""
    odd = {}
    for key, tensor in tensors(weights).items():
        storage = torch.cat([torch.full((3,), 7.0), turned(tensor).flatten(), torch.zeros(2)])
        odd[key] = turned(storage[3:-2].view(turned(tensor).shape))
    torch.save(odd, folder / "a.pth")
    return folder / "a.pth"


def folder_of_parts(weights, folder):
    keys = [*weights]
    places = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(keys)}
    for name in {*places.values()}:
        save_file({k: weights[k] for k in keys if places[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def folder_of_orbax(weights, folder):
    tree = {"params": unflatten_dict(weights, sep=".")}
    ocp.PyTreeCheckpointer().save(folder / "orbax", tree)
    return folder / "orbax"


def file_of_lightning(weights, folder):
    """Writes a training checkpoint, whose settings need a package that is not installed."""
    settings = types.ModuleType("omegaconf")
    settings.DictConfig = type("DictConfig", (), {"__module__": settings.__name__})
    of_program = settings.DictConfig()
    of_program._content = {"d_model": [8], "folder": folder}
    content = {
        "epoch": 3,
        "state_dict": tensors(weights),
        "hyper_parameters": of_program,
        "loops": collections.defaultdict(int, {"steps": 9}),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
    }
    with mock.patch.dict(sys.modules, {settings.__name__: settings}):
        torch.save(content, folder / "weights.ckpt")
    return folder / "weights.ckpt"


FORMATS = (
    file_of_lightning,
    safetensors_file,
    torch_file,
    old_torch_file,
    views_in_a_torch_file,
    folder_of_parts,
    folder_of_orbax,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "silero_vad"])
def test_every_family_is_read(name, tmp_path):
    """`test_layouts.py` reads all layouts of each family, as does the registry."""
    config = MODELS.get(name)
    model = initial(config) if config else SileroVAD(rngs=nnx.Rngs(0))
    options = fields_without_shape(config) if config else {}
    read = load_pretrained(safetensors_file(to_torch(model), tmp_path), **options)
    assert type(read) is type(model)
    assert getattr(read, "config", None) == config
    assert_same_weights(to_torch(read), to_torch(model))


def file_beside_an_index(weights, folder):
    save_file(weights, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("form", "others"),
    [
        (file_beside_an_index, ["pytorch_model.bin"]),
        (folder_of_parts, ["pytorch_model.bin"]),
        (lambda weights, folder: save_file(weights, folder / "rwkv.safetensors"), []),
    ],
)
def test_other_files_of_a_folder_are_ignored(form, others, tmp_path):
    """They are a second format of the weights, and the state of a training."""
    form(weights_of(RWKV7), tmp_path)
    for name in (*others, "optimizer.pt", "training_args.bin", "rng_state.pth"):
        torch.save({"a": torch.zeros(1)}, tmp_path / name)
    assert_same_weights(to_torch(load_pretrained(tmp_path)), weights_of(RWKV7))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form, tmp_path):
    """The weights are bitwise equal."""
    read = load_pretrained(form(weights_of(RWKV7), tmp_path))
    assert read.config == RWKV7
    assert_same_weights(to_torch(read), weights_of(RWKV7))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept_or_cast(dtype, tmp_path):
    model = RWKV.build(rngs=nnx.Rngs(0), param_dtype=dtype)
    path = safetensors_file(to_torch(model), tmp_path)
    wide = {"param_dtype": "float32"}
    for options, param_dtype, result in (
        ({}, dtype, "float32" if dtype == "float16" else dtype),
        (wide, "float32", "float32"),
        (wide | {"dtype": "bfloat16"}, "float32", "bfloat16"),
    ):
        read = load_pretrained(path, **options)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(read))} == {jnp.dtype(param_dtype)}
        assert jax.eval_shape(read, jnp.zeros((1, 2), int))[0].dtype == result
    narrow = load_pretrained(path, param_dtype="bfloat16")
    key = "blocks.0.att.key.weight"
    expected = to_torch(model)[key].astype(jnp.bfloat16)
    assert to_torch(narrow)[key].tobytes() == expected.tobytes()


def test_each_parameter_goes_to_its_sharding(tmp_path):
    path = safetensors_file(weights_of(RWKV7), tmp_path)
    mesh = Mesh(jax.devices()[:1], ("x",))
    shapes = {}

    def sharding(name, shape):
        shapes[name] = shape
        return NamedSharding(mesh, P("x") if name.endswith("kernel") else P())

    model = load_pretrained(path, sharding=sharding)
    for name, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value, name = param.get_value(), ".".join(map(str, name))
        assert shapes[name] == value.shape
        assert value.sharding == sharding(name, value.shape)


@pytest.mark.parametrize("blocks", ["", "-checkpointed"])
def test_a_published_folder_of_hyena_dna_is_read(blocks, tmp_path):
    """It is as the training program saved it, with a config.json whose vocabulary is rounded up."""
    config = replace(HYENA_DNA, vocab_size=16)
    file_of_lightning(weights_of(config, f"safari-lightning{blocks}"), tmp_path)
    fields = {"d_model": 6, "n_layer": 2, "vocab_size": 12, "pad_vocab_size_multiple": 8}
    in_config(**fields)(tmp_path)
    read = load_pretrained(tmp_path)
    assert read.config == config
    assert_same_weights(to_torch(read), weights_of(config))
    in_config(**fields | {"n_layer": 3})(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: n_layer is 3, the weights have 2"):
        load_pretrained(tmp_path)


@pytest.fixture
def folder(tmp_path):
    """A folder with an RWKV-4 under transformers' keys."""
    save_file(weights_of(RWKV, "hf"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": 6}))
    return tmp_path


def in_config(**fields):
    return lambda folder: (folder / "config.json").write_text(json.dumps(fields))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_a_larger_shape(folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["rwkv.ln_out.weight"]["shape"] = [2**30]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def that_expands(folder):
    """A compressed file of a megabyte that expands to a gigabyte of zeros."""
    torch.save({"weight": torch.zeros(2)}, folder / "a.pth")
    with (
        zipfile.ZipFile(folder / "a.pth") as source,
        zipfile.ZipFile(folder / "b.pth", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, bytes(2**24) if name.endswith("data/0") else content)
    for name in ("a.pth", "model.safetensors"):
        (folder / name).unlink()


def like_a_run(folder):
    (folder / "vocabulary.json").write_text("{}")
    (folder / "checkpoints").mkdir()


def with_a_training_state(folder):
    state = {"params": {"a": jnp.zeros(2)}, "optimizer": [jnp.zeros(2)]}
    ocp.PyTreeCheckpointer().save(folder, state, force=True)


def index_of(places):
    def indexed(folder):
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": places}))
        (folder / "model.safetensors").rename(folder / "whole.safetensors")

    return indexed


BAD = [
    (
        r"^[^/]+: expected one file of weights \(\.safetensors, .*\), .*, got none",
        lambda f: (f / "model.safetensors").unlink(),
    ),
    (
        r"config.json: model_type: expected that of .*, got llama \(LlamaForCausalLM\)",
        in_config(model_type="llama", architectures=["LlamaForCausalLM"]),
    ),
    (
        "config.json: num_hidden_layers is 4, the weights have 2",
        in_config(model_type="rwkv", num_hidden_layers=4),
    ),
    ("config: vocab_size:", in_config(model_type="recurrent_gemma")),
    ("config.json: Expec", lambda f: (f / "config.json").write_text("{")),
    ("model.safetensors: not a whole safetensors file", cut),
    ("not a whole safetensors file", with_a_larger_shape),
    (
        "index.json: it lists part.safetensors, which is missing",
        index_of({"head.weight": "part.safetensors"}),
    ),
    (
        "whole.safetensors: no tail.weight, which the index says",
        index_of({"tail.weight": "whole.safetensors"}),
    ),
    (
        "expected files of its folder, got ../whole.safetensors",
        index_of({"head.weight": "../whole.safetensors"}),
    ),
    (
        "expected one file of weights .*, got a.safetensors, b.safetensors",
        lambda f: (
            shutil.copy(f / "model.safetensors", f / "a.safetensors"),
            (f / "model.safetensors").rename(f / "b.safetensors"),
        ),
    ),
    ("b.pth: refused, it is compressed", that_expands),
    (r"got the folder of a run: use --run .* twinscan\.Run\.open", like_a_run),
    ("got a list in optimizer; save the weights alone", with_a_training_state),
]


@pytest.mark.parametrize(("message", "damage"), BAD)
def test_what_is_no_checkpoint_is_refused(message, damage, folder):
    damage(folder)
    with pytest.raises((OSError, ValueError), match=message):
        load_pretrained(folder)


def test_the_name_of_a_repository_is_no_path():
    with pytest.raises(FileNotFoundError, match=r"Hugging Face.*: 'google/recurrentgemma-2b'"):
        load_pretrained("google/recurrentgemma-2b")


def test_other_models_have_a_way_to_be_read(tmp_path):
    weights = {key: array.numpy() for key, array in torch.nn.LSTM(2, 3).state_dict().items()}
    with pytest.raises(ValueError, match=r"got another model \(it has .*\); from_torch reads it"):
        load_pretrained(safetensors_file(weights, tmp_path))


MEASURE = """
import sys
from benchmarks.full_size import memory, reset_peak
from jax_models import load_pretrained
load_pretrained(sys.argv[1])  # a small one, for what it imports
before = reset_peak()
model = load_pretrained(sys.argv[2])
print(memory("VmHWM") - before)
"""


LARGE_RWKV = replace(RWKV, vocab_size=16_000, features=1024, num_layers=3, hidden_features=4096)
LARGE_QWEN = Qwen35LanguageModelConfig(
    vocab_size=32_000, features=1024, mlp_features=3584, num_heads=8, head_features=256,
    num_key_heads=16, num_value_heads=16, key_features=128, value_features=128,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "small", "large", "layout", "dtype"),
    [
        (torch_file, RWKV, LARGE_RWKV, "blinkdl", "float32"),
        (folder_of_parts, MODELS["Qwen35LanguageModel"], LARGE_QWEN, "hf-file", "bfloat16"),
    ],
)
def test_little_more_than_the_model_is_in_memory(form, small, large, layout, dtype, tmp_path):
    """It needs the model's size, its largest tensor, and up to 16 MiB for Python.

    `benchmarks/full_size.py` measures models of the published sizes.
    """
    paths, sizes = [], []
    for name, config in {"small": small, "large": large}.items():
        model = nnx.eval_shape(partial(build, config, param_dtype=dtype))
        nnx.update(model, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), nnx.state(model)))
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config.to_hf()))
        weights = to_torch(model, layout)
        paths.append(str(form(weights, tmp_path / name)))
        sizes = [array.nbytes / 2**20 for array in weights.values()]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True
    )
    assert 200 < sum(sizes) < float(run.stdout) < sum(sizes) + max(sizes) + 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        replace(HIPPOGRIFF, window=7, num_kv_heads=2),
        replace(HIPPOGRIFF_3, num_heads=2, window=4),
        replace(HYENA_DNA, normalized=True, kernel_size=4, order=3),
        replace(HYENA_DNA, modulate=False, filter_bias=False, activation="gelu", shift=0.0),
    ],
)
def test_what_no_file_tells_is_given_by_name(config, tmp_path):
    path = torch_file(weights_of(config), tmp_path)
    told = vars(load_pretrained(path).config)
    options = {name: value for name, value in vars(config).items() if told[name] != value}
    assert options
    assert "kernel_size" not in options  # a shape determines it
    model = load_pretrained(path, **options)
    assert model.config == config
    assert_same_weights(to_torch(model), weights_of(config))
    with pytest.raises(TypeError, match=r"Config: vocab: .* vocab_size"):
        load_pretrained(path, vocab=3)


def test_a_hippogriff_without_a_hawk_is_refused(tmp_path):
    weights = weights_of(HIPPOGRIFF_3, "hippogriff-file")
    mamba = {
        key.replace("forget_base", "A_log"): array
        for key, array in weights.items()
        if "alpha_log_scale" not in key
    }
    with pytest.raises(ValueError, match=r'is not "Hawk" \(it has backbone.0.time.A_log\)'):
        load_pretrained(safetensors_file(mamba, tmp_path))
