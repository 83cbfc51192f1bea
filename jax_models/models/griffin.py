"""The Griffin language model, as RecurrentGemma (arXiv 2402.19427 and 2404.07839)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, Unpack, get_args

import jax.numpy as jnp
import ml_dtypes
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.activation import Gelu
from jax_models.layers.griffin import GriffinBlock, GriffinMixing
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, nested, rms_norm, same, tied
from jax_models.weights.keys import elsewhere

HF_ACTIVATIONS: dict[str, Gelu] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""What transformers calls them; its default first."""


class Names(NamedTuple):
    """What a layout calls the parts that tell the sizes, and the axes that do."""

    embedding: str
    blocks: str
    norm: str
    mlp: tuple[str, int]
    gates: str
    conv: tuple[str, int]
    keys: tuple[str, int]
    query_bias: str
    window: int
    """That of the published models, which no shape tells: recurrentgemma counts the steps before
    the current one, transformers counts the current one among them."""


DEEPMIND = Names(
    "embedder.input_embedding",
    "blocks",
    "final_norm",
    ("mlp_block.ffw_up.w", 2),
    "recurrent_block.rg_lru.input_gate.w",
    ("recurrent_block.conv_1d.w", 0),
    ("attention_block.proj_k.kernel", 1),
    "attention_block.proj_q.bias",
    2049,
)
NAMES = {
    "hf": Names(
        "model.embed_tokens.weight",
        "model.layers",
        "model.final_norm",
        ("mlp_block.gate_proj.weight", 0),
        "temporal_block.rg_lru.input_gate_weight",
        ("temporal_block.conv_1d.weight", 2),
        ("temporal_block.k_proj.weight", 0),
        "temporal_block.q_proj.bias",
        2048,
    ),
    "deepmind": DEEPMIND,
    "deepmind-torch": DEEPMIND._replace(keys=("attention_block.proj_k.weight", 0)),
}


@dataclasses.dataclass(frozen=True)
class GriffinLanguageModelConfig(StackConfig):
    """The Griffin language model. Except for the sizes, the defaults are RecurrentGemma's."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    mlp_features: int = 576
    """Width of the gated MLPs; three times `features` in the paper."""
    recurrent_features: int = 192
    """Width of the recurrences."""
    num_heads: int = 4
    """Heads of the attention, and blocks of the recurrences' gates."""
    num_kv_heads: int = 1
    """Heads of the keys and values."""
    window: int = 64
    """Steps that a step of the attention sees, including itself: what transformers calls
    attention_window_size, and one more than what recurrentgemma calls so."""
    kernel_size: int = 4
    """Inputs that the causal convolution sees."""
    block_types: tuple[GriffinMixing, ...] = ("recurrent", "recurrent", "attention")
    """The kinds of the blocks, from the lowest up; the pattern repeats."""
    rotary_fraction: float = 0.5
    """The fraction of each head that rotary positions rotate."""
    rope_theta: float = 10_000.0
    """θ. At position p, the i-th of n pairs is rotated by p · θ^{−i/n}."""
    attention_bias: bool = False
    """Queries, keys and values have biases."""
    activation: Gelu = "gelu_tanh"
    """The gelu of gates and MLPs."""
    epsilon: float = 1e-6
    """ε of the norms."""
    scale_embeddings: bool = True
    """Embeddings are multiplied by √features, rounded to bfloat16."""
    logits_soft_cap: float = 30.0
    """Logits are cap · tanh(logits / cap). 0: no cap."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and blocks that there are not."""
        super().__post_init__()
        kinds = get_args(GriffinMixing)
        types = tuple(self.block_types) if isinstance(self.block_types, list | tuple) else ()
        if not types or not all(kind in kinds for kind in types):
            raise ValueError(f"block_types: expected some of {kinds}, got {self.block_types!r}")
        object.__setattr__(self, "block_types", types)
        if self.logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap: expected at least 0, got {self.logits_soft_cap}")

    @property
    def mixings(self) -> list[GriffinMixing]:
        """What each block mixes the steps by."""
        kinds = self.block_types
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]

    def build(self, **options: Unpack[BuildOptions]) -> "GriffinLanguageModel":
        """The model of this config."""
        return GriffinLanguageModel(self, **options)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """The config in the config.json of a RecurrentGemma of transformers.

        Raises:
            ValueError: it is of another model, or of an option that this one does not have, or a
                size is missing.

        """
        expected = {
            "model_type": ("recurrent_gemma",),
            "tie_word_embeddings": (True,),
            "hidden_activation": tuple(HF_ACTIVATIONS),
            "attention_dropout": (0,),
        }
        defaults = {"model_type": None}
        for name, values in expected.items():
            if (value := config.get(name, defaults.get(name, values[0]))) not in values:
                known = " or ".join(map(str, values))
                raise ValueError(f"config: {name}: expected {known}, got {value}")
        rope = {**config, **(config.get("rope_parameters") or {})}
        if (kind := rope.get("rope_type", "default")) != "default":
            raise ValueError(f"config: rope_type: expected default, got {kind}")

        def size(name: str) -> int:
            if not isinstance(value := config.get(name), int):
                raise ValueError(f"config: {name}: expected an integer, got {value!r}")
            return value

        return cls(
            vocab_size=size("vocab_size"),
            features=size("hidden_size"),
            num_layers=size("num_hidden_layers"),
            mlp_features=size("intermediate_size") // 2,
            recurrent_features=config.get("lru_width") or size("hidden_size"),
            num_heads=size("num_attention_heads"),
            num_kv_heads=config.get("num_key_value_heads") or size("num_attention_heads"),
            window=config.get("attention_window_size", 2048),
            kernel_size=config.get("conv1d_width", 4),
            block_types=tuple(config.get("block_types") or cls.block_types),
            rotary_fraction=float(rope.get("partial_rotary_factor", 0.5)),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            attention_bias=config.get("attention_bias", False),
            activation=HF_ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")],
            epsilon=config.get("rms_norm_eps", 1e-6),
            logits_soft_cap=float(config.get("logits_soft_cap", 30.0)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model as a RecurrentGemma of transformers.

        Raises:
            ValueError: transformers has no such option.

        """
        if not self.scale_embeddings:
            raise ValueError("a RecurrentGemma of transformers scales its embeddings, this not")
        of_ours = {ours: theirs for theirs, ours in HF_ACTIVATIONS.items()}
        rotary = {"rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_fraction}
        return {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "model_type": "recurrent_gemma",
            "vocab_size": self.vocab_size,
            "hidden_size": self.features,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": 2 * self.mlp_features,
            "lru_width": self.recurrent_features,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "attention_window_size": self.window,
            "conv1d_width": self.kernel_size,
            "block_types": [*self.block_types],
            "rope_parameters": {"rope_type": "default", **rotary},
            **rotary,
            "attention_bias": self.attention_bias,
            "hidden_activation": of_ours[self.activation],
            "rms_norm_eps": self.epsilon,
            "logits_soft_cap": self.logits_soft_cap,
            "tie_word_embeddings": True,
        }

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """The config of a checkpoint, read from its shapes, in any of the model's layouts.

        What no shape tells is as in the published models, unless `options` say otherwise: `window`
        (2048 in transformers' layout, 2049 in recurrentgemma's), `scale_embeddings`,
        `logits_soft_cap`, `rotary_fraction`, `rope_theta`, `activation` and `epsilon`.

        Raises:
            TypeError: the state_dict is no mapping, or there is no such option.
            ValueError: it is not a checkpoint of such a model.

        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
        shapes = {str(key): tuple(getattr(a, "shape", ())) for key, a in state_dict.items()}
        layout = _layout(state_dict)
        names = NAMES[layout]

        def size(block: int | None, part: tuple[str, int], rank: int) -> int:
            key = part[0] if block is None else f"{names.blocks}.{block}.{part[0]}"
            if key not in shapes:
                raise ValueError(f"state_dict: not of a Griffin, it has no {key}")
            if len(shapes[key]) != rank:
                raise ValueError(f"state_dict: {key}: expected {rank} axes, got {shapes[key]}")
            return shapes[key][part[1]]

        mixings: list[GriffinMixing] = []
        while True:
            block = f"{names.blocks}.{len(mixings)}"
            if f"{block}.{names.gates}" in shapes:
                mixings.append("recurrent")
            elif f"{block}.{names.keys[0]}" in shapes:
                mixings.append("attention")
            else:
                break
        fields: dict[str, Any] = {
            "vocab_size": size(None, (names.embedding, 0), 2),
            "features": size(None, (names.embedding, 1), 2),
            "num_layers": len(mixings),
            "mlp_features": size(0, names.mlp, 2 if layout == "hf" else 3),
            "block_types": _cycle(mixings),
            "window": names.window,
        }
        if "recurrent" in mixings:
            block = mixings.index("recurrent")
            fields["num_heads"] = size(block, (names.gates, 0), 3)
            fields["recurrent_features"] = fields["num_heads"] * size(block, (names.gates, 1), 3)
            fields["kernel_size"] = size(block, names.conv, 3 if layout == "hf" else 2)
        if "attention" in mixings:
            block = mixings.index("attention")
            of_keys = size(block, names.keys, 2)
            fields.setdefault("num_heads", fields["features"] // max(of_keys, 1))
            fields["num_kv_heads"] = of_keys * fields["num_heads"] // fields["features"]
            fields["attention_bias"] = f"{names.blocks}.{block}.{names.query_bias}" in shapes
        return cls(**fields | options)


def _layout(state_dict: Mapping[str, Any]) -> str:
    """The layout of a checkpoint, or the fault."""
    if NAMES["hf"].embedding in state_dict:
        return "hf"
    if DEEPMIND.embedding in state_dict:
        flax = any(str(key).endswith(".kernel") for key in state_dict)
        return "deepmind" if flax else "deepmind-torch"
    embeddings = (NAMES["hf"].embedding, DEEPMIND.embedding)
    if found := elsewhere(state_dict, [{key} for key in embeddings]):
        raise ValueError(f"state_dict: {found}")
    raise ValueError(f"state_dict: not of a Griffin, it has no {' and no '.join(embeddings)}")


def _cycle(mixings: list[GriffinMixing]) -> tuple[GriffinMixing, ...]:
    """The shortest pattern that they repeat."""
    count = len(mixings)
    for length in range(1, count):
        if all(mixings[i] == mixings[i % length] for i in range(count)):
            return tuple(mixings[:length])
    return tuple(mixings)


def capped(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """`cap · tanh(logits / cap)`."""
    return cap * jnp.tanh(logits / cap)


class GriffinLanguageModel(LanguageModel):
    """Token embedding → Griffin blocks → RMSNorm → the token embedding again.

        >>> config = GriffinLanguageModelConfig(features=64, recurrent_features=64, mlp_features=96)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = cap · tanh(norm(layers(√features · E[tokens])) Eᵀ / cap)

    The state is bounded: a block carries its recurrence, or the keys and values of a window.
    Documents that are packed into a row (`reset`) stay apart, and their positions begin at 0.

    Args:
        config: the sizes; `GriffinLanguageModelConfig.from_hf` reads them from a config.json,
            `from_state_dict` from a checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as recurrentgemma does.

    Layouts: `hf` (transformers' RecurrentGemmaForCausalLM, whose `lm_head.weight` is the
    embedding), `hf-file` (the same without that key, as its files have it), and, with one head of
    keys and no biases of queries, `deepmind` (the parameters of recurrentgemma's Griffin in Flax,
    their paths joined by dots) and `deepmind-torch` (its PyTorch checkpoints).

    """

    def __init__(
        self,
        config: GriffinLanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.cap = config.logits_soft_cap
        self.scale = 1.0
        if config.scale_embeddings:
            self.scale = float(ml_dtypes.bfloat16(config.features**0.5))
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.features,
            embedding_init=nnx.initializers.normal(config.features**-0.5),
            **options,
        )
        self.pos_embedding = None
        blocks = (
            GriffinBlock(
                config.features,
                config.mlp_features,
                config.num_heads,
                mixing=mixing,
                recurrent_features=config.recurrent_features,
                kernel_size=config.kernel_size,
                num_kv_heads=config.num_kv_heads,
                window=config.window,
                rotary_fraction=config.rotary_fraction,
                rope_theta=config.rope_theta,
                attention_bias=config.attention_bias,
                activation=config.activation,
                epsilon=config.epsilon,
                out_variance=2 / config.num_layers,
                **options,
            )
            for mixing in config.mixings
        )
        self.layers = config.stack(blocks)
        self.norm = ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon, **options)

    def embed(self, tokens, positions):
        """The embeddings of the tokens, scaled."""
        return super().embed(tokens, positions) * self.scale

    def head(self, x):
        """`x Eᵀ`, capped."""
        logits = ops.affine(x, self.embedding.embedding[...].T.astype(x.dtype))
        return (capped(logits, self.cap) if self.cap else logits).astype(x.dtype)

    def torch_layouts(self) -> Layouts:
        """The keys of transformers, and those of recurrentgemma, where it has such a model."""
        table = "embedding.embedding"
        layouts = {}
        for layout, blocks in self.layers.torch_layouts().items():
            names = NAMES[layout]
            hf = layout == "hf"
            layers = [
                *nested(blocks, "layers", names.blocks),
                *rms_norm("norm", names.norm, "weight" if hf else "scale"),
            ]
            layouts[layout] = [same(table, names.embedding), *layers]
            if hf:
                layouts["hf"] = [tied(table, (names.embedding, "lm_head.weight")), *layers]
                layouts["hf-file"] = [same(table, names.embedding), *layers]
        return layouts
