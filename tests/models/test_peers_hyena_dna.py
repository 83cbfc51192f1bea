"""Compares HyenaDNA and safari with HyenaDNA's standalone file, part of the package `helical`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from peers import assert_same_logits_and_gradients
from torch.nn import functional as F

from jax_models import HyenaDNALanguageModelConfig, HyenaDNAMixer, from_weights
from parity_tests import assert_parity
from parity_tests.engine.problem import in_every_dtype
from train.data.published_vocabulary import Nucleotides

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

SIZES: dict[str, Any] = {"context_length": 96, "features": 24, "mlp_features": 40}
CONFIGS = {
    "as HyenaDNA": HyenaDNALanguageModelConfig(**SIZES, num_layers=3, embed_features=5),
    "of order 3": HyenaDNALanguageModelConfig(
        **SIZES, num_layers=2, order=3, embed_features=7, filter_features=20, num_filter_layers=3
    ),
}
OF_SAFARI: list[dict[str, Any]] = [
    {"activation": "identity", "order": 3, "shift": 0.0},
    {"activation": "gelu", "order": 3, "shift": 0.2, "normalized": True},
    {"activation": "relu", "kernel_size": 5, "normalized": True, "modulate": False},
    {"activation": "sigmoid", "order": 4, "filter_bias": False},
    *({"activation": name} for name in ("silu", "softplus", "tanh")),
]
TIME = 21
TOKENS = np.random.default_rng(0).integers(0, 12, (2, TIME))


@pytest.fixture(scope="module")
def standalone() -> Any:
    """Imports the single file from `helical`, without the other modules of the package."""
    package = importlib.util.find_spec("helical")
    if package is None or not package.submodule_search_locations:
        pytest.skip("helical is not installed")
    pytest.importorskip("transformers")
    folder = "helical.models.hyena_dna"
    path = Path(package.submodule_search_locations[0], "models/hyena_dna/standalone_hyenadna.py")
    names = ("helical", "helical.models", folder, f"{folder}.stochastic_depth")
    others = {name: ModuleType(name) for name in names}
    others[names[-1]].__dict__["StochasticDepth"] = NoDepth
    spec = importlib.util.spec_from_file_location("standalone_hyenadna", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, other in others.items():
            patch.setitem(sys.modules, name, other)
        spec.loader.exec_module(module)
    return module


class NoDepth(torch.nn.Identity):
    """Stands in for `StochasticDepth`, whose probability is 0 in HyenaDNA."""

    def __init__(self, p: float, mode: str):
        super().__init__()
        assert p == 0, mode


def built(standalone: Any, config: HyenaDNALanguageModelConfig) -> torch.nn.Module:
    """HyenaDNA's model in float64, built as its users do."""
    model = standalone.HyenaDNAModel(
        d_model=config.features,
        n_layer=config.num_layers,
        d_inner=config.mlp_features,
        vocab_size=12,
        pad_vocab_size_multiple=8,
        layer={
            "l_max": config.context_length,
            "order": config.order,
            "filter_order": config.filter_features,
            "emb_dim": config.embed_features,
            "num_inner_mlps": config.num_filter_layers - 2,
            "w": config.omega,
        },
        embed_dropout=0.1,
    )
    return model.double().eval()


def randomise(module: torch.nn.Module) -> None:
    """Draws matrices that keep the scale of their inputs, and biases that are not negligible.

    Positions, times and decays are changed a little from their computed values.
    """
    rng = np.random.default_rng(1)
    for name, tensor in module.state_dict(keep_vars=True).items():
        draw = rng.standard_normal(tuple(tensor.shape))
        if "pos_emb" in name or name.endswith("deltas"):
            draw = tensor.detach().numpy() * (1 + 0.05 * draw)
        elif tensor.ndim == 2 and not name.endswith("freq"):
            draw *= (4 if "mlp.fc2" in name or "out_proj" in name else 1) * tensor.shape[1] ** -0.5
        else:
            draw = (10 if name.endswith("freq") else 0) + 0.5 * draw
        tensor.data = torch.from_numpy(in_every_dtype(draw))


@pytest.fixture(scope="module", params=CONFIGS)
def original(request, standalone) -> tuple[HyenaDNALanguageModelConfig, torch.nn.Module]:
    config = CONFIGS[request.param]
    model = built(standalone, config)
    randomise(model)
    return config, model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits with the embedding as the head, which the file omits but training uses."""
    return F.linear(model(tokens), model.backbone.embeddings.word_embeddings.weight)


def test_logits_and_gradients_are_those_of_the_file(original):
    config, model = original
    assert HyenaDNALanguageModelConfig.from_state_dict(model.state_dict()) == config
    assert_same_logits_and_gradients(model, from_weights, TOKENS, "hyena-dna", logits_of)


def test_the_tokens_are_those_of_the_file(standalone):
    tokenizer = standalone.CharacterTokenizer([*Nucleotides.letters], model_max_length=96)
    text = "ACGTNNTGCA"
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert Nucleotides().encode(text).tolist() == expected
    assert tokenizer.eos_token_id == Nucleotides.end


class SafariOperator(torch.nn.Module):
    """The operator of safari, made of the file's parts, with the options that the file leaves out.

    Each convolution is a sum over the past. Of several filters, the features come first.
    """

    def __init__(self, standalone: Any, features: int, **options: Any):
        super().__init__()
        self.order, self.normalized = options["order"], options["normalized"]
        self.filter_bias, taps = options["filter_bias"], options["kernel_size"]
        self.activation = getattr(F, options["activation"], torch.nn.Identity())
        width = features * (self.order + 1)
        self.in_proj = torch.nn.Linear(features, width)
        self.short_filter = torch.nn.Conv1d(width, width, taps, padding=taps - 1, groups=width)
        self.filter_fn = standalone.HyenaFilter(
            features * (self.order - 1),
            seq_len=TIME + 5,
            order=7,
            num_inner_mlps=1,
            emb_dim=5,
            w=10,
            modulate=options["modulate"],
            shift=options["shift"],
        )
        self.out_proj = torch.nn.Linear(features, features)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        time, features = u.shape[1:]
        h = self.filter_fn.filter(time)  # the network, times the window
        if self.normalized:
            h = h / torch.norm(h, p=1, dim=-1, keepdim=True)
        h = h.reshape(time, features, self.order - 1)
        bias = self.filter_fn.bias.reshape(features, self.order - 1) * self.filter_bias
        first, *x, v = self.short_filter(self.in_proj(u).mT)[..., :time].split(features, dim=1)
        for n, x_n in enumerate(reversed(x)):
            v = v * x_n
            past = [(h[: t + 1, :, n].flip(0).T * v[..., : t + 1]).sum(-1) for t in range(time)]
            v = torch.stack(past, dim=-1) + bias[:, n, None] * v
        return self.out_proj(self.activation(v * first).mT)


@pytest.mark.parametrize("options", OF_SAFARI, ids=str)
def test_the_options_are_those_of_safari(standalone, options):
    given = {"order": 2, "kernel_size": 3, "shift": 0.05, "modulate": True}
    given |= {"normalized": False, "filter_bias": True} | options
    operator = SafariOperator(standalone, 6, **given).double()
    randomise(operator)
    sizes: dict[str, Any] = {"embed_features": 5, "mlp_features": 7, "num_filter_layers": 3}
    sizes |= {"param_dtype": np.float64, "rngs": nnx.Rngs(0)}
    with jax.enable_x64(True):
        layer = HyenaDNAMixer(6, TIME + 5, **sizes, **options)
    x, call = np.random.default_rng(2).standard_normal((2, TIME, 6)), lambda layer, x: layer(x)[0]
    assert_parity(operator, layer, x, weights="safari", call=call, dtypes=["float64"])
