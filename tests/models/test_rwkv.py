"""The files of BlinkDL's checkpoints, and extreme values of RWKV-4 and RWKV-6."""

import io
import pickle
import zipfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save

import torch_ref
from jax_models import RWKV6TimeMix, RWKVTimeMix, read_pth

SIZES = {"vocab_size": 11, "features": 6, "num_layers": 3, "hidden_features": 24}


def checkpoint() -> dict[str, torch.Tensor]:
    """The state_dict of a random RWKV-4 in bfloat16, like BlinkDL's checkpoints."""
    twin = torch_ref.RWKVLanguageModel(*SIZES.values())
    return {key: torch.randn_like(value).bfloat16() for key, value in twin.state_dict().items()}


class Trap:
    """An object whose pickle would run code."""

    def __reduce__(self):
        """Makes unpickling call `print`."""
        return print, ("the pickle ran",)


def test_a_pth_that_needs_more_than_weights_is_refused(tmp_path, capsys):
    torch.save({"emb.weight": torch.zeros(2), "trap": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match=r"trap\.pth: refused, it holds more .*print"):
        read_pth(tmp_path / "trap.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(ValueError, match=r"old\.pth: refused"):
        read_pth(tmp_path / "old.pth")
    assert "the pickle ran" not in capsys.readouterr().out


ADAM = torch.optim.Adam(torch.nn.Linear(2, 3).parameters())
NO_STATE_DICTS = [
    ("", [torch.zeros(2)]),
    ("expected a state_dict, got a dict of", {}),
    ("expected a state_dict, got a dict of", {1: torch.zeros(2)}),
    ("expected a state_dict of a model, got an optimizer's", ADAM.state_dict()),
    (r"rnn\.LSTM; save model\.state_dict\(\) alone", torch.nn.LSTM(2, 3)),
]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("message", "content"), NO_STATE_DICTS)
def test_a_pth_without_a_state_dict_is_refused(message, content, zipped, tmp_path):
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=rf"a\.pth: .*{message}"):
        read_pth(tmp_path / "a.pth")


def test_a_pth_that_is_damaged_or_missing(tmp_path):
    weights = checkpoint()
    torch.save(weights, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    damaged = {f"cut{end}": whole[:end] for end in (4, 2000, len(whole) // 2, -1)}
    place = whole.index(weights["emb.weight"].view(torch.uint8).numpy().tobytes())
    damaged["flipped"] = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for name, content in damaged.items():
        (tmp_path / f"{name}.pth").write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{name}\.pth: not a whole file .*[^:]$"):
            read_pth(tmp_path / f"{name}.pth")
    with pytest.raises(FileNotFoundError):
        read_pth(tmp_path / "none.pth")
    with pytest.raises(TypeError, match="path:"):
        read_pth(None)  # pyright: ignore[reportArgumentType]


def zipped(files: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(archive := io.BytesIO(), "w") as writer:
        for name, content in files.items():
            writer.writestr(name, content)
    return archive.getvalue()


OTHER_FILES = [
    ("it is empty", b""),
    (r"safetensors\.torch\.load_file", save({"a": np.zeros(3, np.float32)})),
    ("it is a web page", b"\n<!doctype html>\n<html>"),
    ("git lfs pull", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    (r"numpy\.load", b"\x93NUMPY\x01\x00"),
    ("unpack it first", b"BZh91AY"),
    ("a zip archive", zipped({"weights.pth": b"..."})),
    ("a Keras model: .*from_keras", zipped({"config.json": b"{}", "model.weights.h5": b"..."})),
    ("an ONNX model: .*from_onnx", b"\x08\x0a\x12\x07pytorch"),
    ("a JSON text: .*folder", b'\n{"model_type": "rwkv"}'),
    ("a pickle of another program", pickle.dumps({"a": 3})),
    ("a pickle of another program", pickle.dumps({"a": 3}, protocol=0)),
    ("a text", b"hello world\n"),
]


@pytest.mark.parametrize(("what", "content"), OTHER_FILES)
def test_a_file_of_another_format_is_named(what, content, tmp_path):
    (tmp_path / "other.pth").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^other\.pth: not a file of torch\.save, .*{what}"):
        read_pth(tmp_path / "other.pth")


@pytest.mark.slow
@pytest.mark.parametrize("build", [RWKVTimeMix, partial(RWKV6TimeMix, head_size=4)])
def test_a_decay_beyond_float32_forgets_at_once(build):
    layer = build(4, rngs=nnx.Rngs(0))
    layer.time_decay[...] = jnp.full(4, 1e4)
    x = np.random.default_rng(0).standard_normal((1, 40, 4)).astype(np.float32)
    graphdef, params = nnx.split(layer)
    gradients = jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(x)[0] ** 2))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
