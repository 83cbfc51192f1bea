"""Files and folders of weights: read a tensor at a time, whatever their format, or refused."""

import collections
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jax_models import (
    HippogriffLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    RWKV7LanguageModelConfig,
    RWKVLanguageModelConfig,
    SileroVAD,
    load_pretrained,
    to_torch,
)
from jax_models.weights.checkpoint import open_checkpoint
from parity_tests.registry import CASES

SIZES = {"vocab_size": 12, "features": 8, "num_layers": 3}
CONFIGS = {
    "rwkv": RWKVLanguageModelConfig(**SIZES, hidden_features=16),
    "rwkv7": RWKV7LanguageModelConfig(**SIZES, head_size=4),
    "hippogriff": HippogriffLanguageModelConfig(
        vocab_size=12, features=8, hidden_features=6, mlp_features=9, num_heads=2, window=513
    ),
    "hippogriff, 0.0.3": HippogriffLanguageModelConfig(
        vocab_size=12,
        features=8,
        hidden_features=6,
        mlp_features=9,
        num_heads=None,
        kernel_size=None,
        window=513,
        version="0.0.3",
    ),
    "hyena_dna": HyenaDNALanguageModelConfig(context_length=32, features=8, mlp_features=9),
}


PUBLISHED = {
    name: case.config
    for name, case in CASES.items()
    if case.config is not None and (case.config.marks or case.config.model_types)
}
"""The language models of the registry whose checkpoints are recognized."""


@pytest.fixture(params=[*PUBLISHED, "silero_vad"])
def model(request):
    """With the weights that it draws, in which zeros and ones are not rare."""
    build = SileroVAD if request.param == "silero_vad" else PUBLISHED[request.param].build
    return build(rngs=nnx.Rngs(0))


def untold(model):
    """The fields of a model's config that no shape tells."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    layout = next(iter(config.layouts.values()))
    told = {name for name, size in layout.sizes.items() if isinstance(size, tuple | Callable)}
    told |= {"vocab_size", "features", "num_layers"}
    return {name: value for name, value in vars(config).items() if name not in told}


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
    """Its axes in the other order."""
    return tensor.permute(*reversed(range(tensor.ndim)))


def views_in_a_torch_file(weights, folder):
    """Transposed, and parts of others' storages."""
    odd = {}
    for key, tensor in tensors(weights).items():
        storage = torch.cat([torch.full((3,), 7.0), turned(tensor).flatten(), torch.zeros(2)])
        odd[key] = turned(storage[3:-2].view(turned(tensor).shape))
    torch.save(odd, folder / "a.pth")
    return folder / "a.pth"


def folder_of_one(weights, folder):
    torch_file(weights, folder).rename(folder / "pytorch_model.bin")
    return folder


def folder_of_parts(weights, folder):
    keys = [*weights]
    places = {key: f"part-{i % 2}.safetensors" for i, key in enumerate(keys)}
    for name in {*places.values()}:
        save_file({k: weights[k] for k in keys if places[k] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def folder_of_orbax(weights, folder):
    tree = {"params": {}}
    for key, array in weights.items():
        *path, last = key.split(".")
        at = tree["params"]
        for name in path:
            at = at.setdefault(name, {})
        at[last] = array
    ocp.PyTreeCheckpointer().save(folder / "orbax", tree)
    return folder / "orbax"


def file_of_lightning(weights, folder):
    """With what a training program has beside weights; the package of its settings is not there."""
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
    folder_of_one,
    folder_of_parts,
    folder_of_orbax,
)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_of_every_family_is_read(model, form, tmp_path):
    """Bit for bit; and no weights are drawn."""
    weights = to_torch(model)
    path = form(weights, tmp_path)
    read = load_pretrained(path, **untold(model))
    assert type(read) is type(model)
    assert getattr(read, "config", None) == getattr(model, "config", None)
    back = to_torch(read)
    assert back.keys() == weights.keys()
    for key, array in weights.items():
        assert back[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept_or_cast(dtype, tmp_path):
    model = CONFIGS["rwkv"].build(rngs=nnx.Rngs(0), param_dtype=dtype)
    path = safetensors_file(to_torch(model), tmp_path)
    kept, wide = load_pretrained(path), load_pretrained(path, param_dtype="float32")
    computed = "float32" if dtype == "float16" else dtype
    for read, param_dtype, result in ((kept, dtype, computed), (wide, "float32", "float32")):
        assert {x.dtype for x in jax.tree.leaves(nnx.state(read))} == {jnp.dtype(param_dtype)}
        assert read(jnp.zeros((1, 2), int))[0].dtype == result
    narrow = load_pretrained(path, param_dtype="bfloat16")
    key = "blocks.0.att.key.weight"
    expected = to_torch(model)[key].astype(jnp.bfloat16)
    assert to_torch(narrow)[key].tobytes() == expected.tobytes()


def test_each_parameter_goes_to_its_sharding(tmp_path):
    path = safetensors_file(to_torch(CONFIGS["rwkv7"].build(rngs=nnx.Rngs(0))), tmp_path)
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
    """As its training program saved it; the vocabulary of its config.json is rounded up."""
    model = CONFIGS["hyena_dna"].build(rngs=nnx.Rngs(0))
    file_of_lightning(to_torch(model, f"safari-lightning{blocks}"), tmp_path)
    fields = {"d_model": 8, "n_layer": 2, "vocab_size": 12, "pad_vocab_size_multiple": 8}
    in_config(**fields)(tmp_path)
    read = load_pretrained(tmp_path)
    assert read.config == model.config
    tokens = np.arange(7, 12)[None]
    np.testing.assert_array_equal(read(tokens)[0], model(tokens)[0])
    in_config(**fields | {"n_layer": 3})(tmp_path)
    with pytest.raises(ValueError, match=r"config.json: n_layer is 3, the weights have 2"):
        load_pretrained(tmp_path)


GRIFFIN = {"model_type": "recurrent_gemma", "architectures": ["RecurrentGemmaForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    """An RWKV-4 under transformers' keys."""
    weights = to_torch(CONFIGS["rwkv"].build(rngs=nnx.Rngs(0)), "hf")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv", "hidden_size": 8}))
    return tmp_path


def in_config(**fields):
    return lambda folder: (folder / "config.json").write_text(json.dumps(fields))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_header(change):
    def damage(folder):
        file = folder / "model.safetensors"
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        entry = header["rwkv.ln_out.weight"]
        entry |= change(entry)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return damage


def with_weights(change):
    def other(folder):
        path = folder / "model.safetensors"
        weights = {key: np.asarray(each) for key, each in open_checkpoint(folder).weights.items()}
        change(weights)
        save_file(weights, path)

    return other


class Code:
    def __reduce__(self):
        return (os.system, ("true",))


def with_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2), "code": Code()}, folder / "a.pth")


def that_expands(folder):
    """A gigabyte of zeros, in a megabyte."""
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


def raw_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "a.pth").write_bytes(pickle.dumps({"weight": Code()}))


def index_of(places):
    def indexed(folder):
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": places}))

    return indexed


BAD = [
    ("weights.*got none", lambda f: (f / "model.safetensors").unlink()),
    ("config.json:", in_config(model_type="llama", architectures=["LlamaForCausalLM"])),
    (
        "config.json: num_hidden_layers is 4, the weights have 3",
        in_config(model_type="rwkv", num_hidden_layers=4),
    ),
    ("config: vocab_size:", in_config(**GRIFFIN)),
    ("config.json: Expec", lambda f: (f / "config.json").write_text("{")),
    (
        "state_dict: not a checkpoint of RWKV-4: it has no ",
        with_weights(lambda w: [w.pop(k) for k in [*w] if k != "head.weight"]),
    ),
    (r"missing key rwkv\.ln_out\.bias", with_weights(lambda w: w.pop("rwkv.ln_out.bias"))),
    ("head.weight:", with_weights(lambda w: w.update({"head.weight": np.zeros((12, 8), np.int8)}))),
    (
        "head.weight:",
        with_weights(
            lambda w: w.update({"head.weight": w["head.weight"].astype(jnp.float8_e4m3fn)})
        ),
    ),
    ("model.safetensors: not a whole safetensors file", cut),
    ("not a whole safetensors file", with_header(lambda e: {"shape": [2**30]})),
    (
        "not a whole safetensors file",
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
    ),
    ("part.safetensors", index_of({"head.weight": "part.safetensors"})),
    (
        "model.safetensors: no tail.weight, which the index says",
        index_of({"tail.weight": "model.safetensors"}),
    ),
    (
        "expected files of its folder, got ../model.safetensors",
        index_of({"head.weight": "../model.safetensors"}),
    ),
    (
        "expected one file of weights, .*, got a.pth, model.safetensors",
        lambda f: torch.save({"a": torch.zeros(1)}, f / "a.pth"),
    ),
    ("a.pth: refused, it holds more than weights", with_code),
    ("a.pth: .*more than weights|a.pth: not a file of torch", raw_pickle),
    ("b.pth: refused, it is compressed", that_expands),
]


@pytest.mark.parametrize(("message", "damage"), BAD)
def test_what_is_no_checkpoint_is_refused(message, damage, folder):
    damage(folder)
    with pytest.raises((OSError, ValueError), match=message):
        load_pretrained(folder)


MEASURE = """
import resource, sys
from jax_models import load_pretrained
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
load_pretrained(sys.argv[1])  # a small one, for what it imports
before = peak()
model = load_pretrained(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", [safetensors_file, torch_file])
def test_little_more_than_the_model_is_in_memory(form, tmp_path):
    """Its size and its largest tensor, and 16 MiB for whatever Python keeps."""
    paths, sizes = [], []
    for name, features, vocab_size in (("small", 8, 12), ("large", 1024, 16_000)):
        config = RWKVLanguageModelConfig(
            vocab_size=vocab_size, features=features, num_layers=3, hidden_features=4 * features
        )
        (tmp_path / name).mkdir()
        like = nnx.eval_shape(lambda config=config: config.build(rngs=nnx.Rngs(0)))
        shapes = {
            key: array.shape for key, array in to_torch(nnx.merge(*nnx.split(zeros(like)))).items()
        }
        weights = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
        paths.append(str(form(weights, tmp_path / name)))
        sizes = [array.nbytes / 2**20 for array in weights.values()]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True
    )
    assert sum(sizes) > 200
    assert float(run.stdout) < sum(sizes) + max(sizes) + 16


def zeros(model):
    """A model whose parameters are zeros."""
    for _, param in nnx.to_flat_state(nnx.state(model)):
        like = param.get_value()
        param.set_value(jnp.zeros(like.shape, like.dtype))
    return model


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(CONFIGS["hippogriff"], window=7, num_heads=2, num_kv_heads=2),
        dataclasses.replace(CONFIGS["hippogriff, 0.0.3"], num_heads=2, window=4),
        dataclasses.replace(CONFIGS["hyena_dna"], normalized=True, kernel_size=4, order=3),
        dataclasses.replace(
            CONFIGS["hyena_dna"], modulate=False, filter_bias=False, activation="gelu", shift=0.0
        ),
    ],
)
def test_what_no_file_tells_is_given_by_name(config, tmp_path):
    weights = to_torch(config.build(rngs=nnx.Rngs(0)), _only_layout(config))
    path = safetensors_file(weights, tmp_path)
    told = load_pretrained(path).config
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(told, field.name) != getattr(config, field.name)
    }
    assert options
    assert "kernel_size" not in options  # a shape tells it
    model = load_pretrained(path, **options)
    assert model.config == config
    for key, array in to_torch(model, _only_layout(config)).items():
        np.testing.assert_array_equal(array, weights[key], err_msg=key)
    name = type(config).__name__
    with pytest.raises(TypeError, match=f"^{name}: vocab: .*; did you mean vocab_size.$"):
        load_pretrained(path, vocab=3)


def _only_layout(config):
    """One that safetensors hold: without tied keys."""
    return "hippogriff-file" if hasattr(config, "window") else "hyena-dna-file"


def test_a_hippogriff_without_a_hawk_is_refused(tmp_path):
    weights = to_torch(CONFIGS["hippogriff, 0.0.3"].build(rngs=nnx.Rngs(0)), "hippogriff-file")
    mamba = {
        key.replace("forget_base", "A_log"): array
        for key, array in weights.items()
        if "alpha_log_scale" not in key
    }
    with pytest.raises(ValueError, match=r'is not "Hawk" \(it has backbone.0.time.A_log\)'):
        load_pretrained(safetensors_file(mamba, tmp_path))
