"""Zamba2: Mamba-2, and transformers with attention and an MLP that several blocks share."""

__all__ = ["Zamba2LanguageModel", "Zamba2LanguageModelConfig", "Zamba2State"]

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.layers.linear import Linear, normal_of_fan_in
from jax_models.layers.mamba2 import Mamba2
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import last_axis, whole
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    LINEAR,
    OLDER_KINDS,
    HybridLanguageModel,
    attention_sizes,
    model_layouts,
)
from jax_models.models.mamba2_hybrid import Mamba2HybridConfig, mamba2_sizes
from jax_models.ops import Rows
from jax_models.options import LayerOptions, NormOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, linear, nested, parts, rms_norm
from jax_models.weights.rows import join, repeated

HYBRID = "hybrid"
"""The kind of the blocks with a shared transformer."""
SHARED = "shared_transformer"
MLP_ADAPTERS = f"{SHARED}.feed_forward.gate_up_proj_adapter_list"
ATTENTION_ADAPTERS = f"{SHARED}.self_attn.linear_{{}}_adapter_list"
HYBRIDS = (*range(6, 43, 6), 47, 51)
"""The hybrid blocks of Zamba2-2.7B, and of any other model whose config.json lists no kinds."""


def _num_shared_blocks(checkpoint: Checkpoint) -> int:
    """The distance between the numbers of the adapters in a shared transformer.

    With 2 transformers and 4 hybrid blocks, for example, transformer 0 has adapters 0 and 2.
    """
    count = sum(checkpoint.in_blocks("*.linear.weight"))
    lowest, *others = (
        checkpoint.in_blocks(f"*.{MLP_ADAPTERS}.{number}.0.weight") for number in range(count)
    )
    shares = (any(a and b for a, b in zip(lowest, other, strict=True)) for other in others)
    return next((number for number, shared in enumerate(shares, 1) if shared), count)


def _sizes(checkpoint: Checkpoint) -> Fields:
    mamba = "mamba" if checkpoint.has("*.mamba.A_log") else "mamba_decoder.mamba"
    fields = {
        "block_types": kinds_by_key(checkpoint, "*.linear.weight", HYBRID, LINEAR),
        **mamba2_sizes(checkpoint, mamba),
        "mamba_bias": checkpoint.has(f"*.{mamba}.in_proj.bias"),
        "tied_head": checkpoint.tied_head,
    }
    if not checkpoint.has("*.linear.weight"):
        return fields
    return fields | {
        **attention_sizes(checkpoint, f"{SHARED}.self_attn"),
        "rope_theta": checkpoint.given("rope_theta"),
        "mlp_features": checkpoint.size(f"*.{SHARED}.feed_forward.down_proj.weight", 1, rank=2),
        "num_shared_blocks": _num_shared_blocks(checkpoint),
        "adapter_rank": checkpoint.size(f"*.{MLP_ADAPTERS}.0.0.weight", 0, rank=2),
        "attention_adapters": checkpoint.has(f"*.{ATTENTION_ADAPTERS.format('q')}.0.0.weight"),
    }


LAYOUT, FILE = model_layouts("model", "final_layernorm", _sizes)


@dataclasses.dataclass(frozen=True)
class Zamba2LanguageModelConfig(Mamba2HybridConfig):
    """The config of Zamba2. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Zamba2"
    presets: ClassVar = {"zamba2": {}}
    model_types: ClassVar = ("zamba2",)
    marks: ClassVar = (f".{MLP_ADAPTERS}.",)
    kinds: ClassVar = (LINEAR, HYBRID)
    layouts: ClassVar = {"hf": LAYOUT, "hf-file": FILE}
    hf_class: ClassVar = "Zamba2ForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "mlp_features",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "epsilon",
        "tie_word_embeddings": "tied_head",
        "initializer_range": "initializer_range",
        "n_mamba_heads": "mamba_heads",
        "mamba_d_state": "state_features",
        "mamba_ngroups": "num_groups",
        "mamba_d_conv": "kernel_size",
        "add_bias_linear": "mamba_bias",
        "num_mem_blocks": "num_shared_blocks",
        "use_shared_attention_adapter": "attention_adapters",
        "adapter_rank": "adapter_rank",
    }
    hf_aliases: ClassVar = {"layer_types": "layers_block_type"}
    hf_sizes: ClassVar = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    hf_values: ClassVar = {
        "hidden_act": ("gelu",),
        "attention_dropout": (0,),
        "use_long_context": (False,),
        "rope_type": ("default",),
        "tie_word_embeddings": (True, False),
    }
    hf_defaults: ClassVar = {
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "time_step_min": 0.001,
        "adapter_rank": 128,
    }

    block_types: tuple[str, ...] = (LINEAR, HYBRID)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    num_kv_heads: int = 4
    """Number of heads of the attention's keys and values."""
    rope_theta: Positive | None = None
    """θ of `ops.rotary`. None: the attention has no positions."""
    epsilon: Positive = 1e-5
    """ε of the norms, except for those of the Mamba-2s, which is 1e-5."""
    mamba_bias: bool = False
    """Whether the projections of the Mamba-2s and of the MLPs have biases."""
    dt_limits: tuple[float, float] = (0.001, math.inf)
    """The least and the greatest Δ."""
    num_shared_blocks: int = 1
    """Number of shared transformers. The hybrid blocks use them in turns."""
    adapter_rank: int = 16
    """Rank of the adapters that each hybrid block has for its shared transformer."""
    attention_adapters: bool = False
    """Whether queries, keys and values have adapters, too, and not only the MLP."""
    # transformers has no biases of the attention and always one of the convolution. The heads of
    # the attention divide the width of x and e together.
    attention_bias: ClassVar = False  # pyright: ignore[reportIncompatibleVariableOverride]
    conv_bias: ClassVar = True  # pyright: ignore[reportIncompatibleVariableOverride]
    head_features: ClassVar = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        super().__post_init__()
        if self.attention_adapters and self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads: expected num_heads = {self.num_heads} with attention_adapters, as "
                f"in transformers, got {self.num_kv_heads}"
            )

    def build(self, **options: Unpack[NormOptions]) -> "Zamba2LanguageModel":
        return Zamba2LanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in sizes that depend on others."""
        sizes = {"mamba_n_heads": given["n_mamba_heads"], "mamba_d_head": "auto"}
        return super().converted(given | sizes, config) | {
            "mlp_features": given.get("intermediate_size") or 4 * given["hidden_size"],
            "rope_theta": given.get("rope_theta", 10_000.0) if given.get("use_mem_rope") else None,
            "dt_limits": (given["time_step_min"], math.inf),
        }

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        default = [cls.kinds[i in HYBRIDS] for i in range(54)]
        return [OLDER_KINDS.get(kind, kind) for kind in given.get("layers_block_type", default)]

    def to_hf(self) -> dict[str, Any]:
        least, greatest = self.dt_limits
        if greatest != math.inf:
            raise ValueError(
                f"dt_limits: expected no upper limit, as in transformers, got {greatest}"
            )
        fields = super().to_hf()
        fields["layers_block_type"] = fields.pop("layer_types")
        return fields | {"time_step_min": least, "use_mem_rope": self.rope_theta is not None}

    @property
    def head_size(self) -> int:
        return 2 * self.features // self.num_heads

    def blocks(self, **options: Unpack[LayerOptions]) -> list[SequenceLayer]:
        """Builds all blocks. Each hybrid block gets the next of the shared transformers."""
        shared = [Zamba2Transformer(self, **options) for _ in range(self.num_shared_blocks)]
        turns = itertools.cycle(shared)
        return [
            Zamba2HybridBlock(self, next(turns), is_lowest=i == 0, **options)
            if kind == HYBRID
            else Zamba2Block(self, is_lowest=i == 0, **options)
            for i, kind in enumerate(self.mixings)
        ]

    def attention(self, **options: Any) -> Attention:
        rotary = {"rotary_features": 0} if self.rope_theta is None else {}
        scale = (self.head_size / 2) ** -0.5
        sizes = {"features": 2 * self.features, "out_features": self.features}
        return self.make(Attention, scale=scale, epsilon=None, **sizes, **rotary, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        return self.make(
            Mamba2,
            num_heads=self.mamba_heads,
            head_features=self.mamba_head_features,
            use_bias=self.mamba_bias,
            epsilon=1e-5,
            **options,
        )

    def mlp(self, **options: Any) -> GatedMLP:
        return GatedMLP(self.features, self.mlp_features, use_bias=self.mamba_bias, **options)


class LowRank(nnx.Module):
    """`x W_down W_up`, where the rank is much smaller than the sizes of x and of the result."""

    def __init__(self, features: int, rank: int, out_features: int, **options: Any):
        self.down = Linear(features, rank, **options)
        self.up = Linear(rank, out_features, **options)

    def __call__(self, x):
        """Maps the last axis of x."""
        return self.up(self.down(x))


class AttentionAdapter(nnx.Module):
    """The low-rank terms that a block adds to q, k and v of a shared attention."""

    def __init__(self, features: int, rank: int, **options: Any):
        self.q, self.k, self.v = (LowRank(features, rank, features, **options) for _ in "qkv")

    def __call__(self, x):
        """Returns the three terms."""
        return self.q(x), self.k(x), self.v(x)

    mesh_axes = last_axis("heads", "q.up", "k.up", "v.up") | whole("q.down", "k.down", "v.down")


class MLPAdapter(nnx.Module):
    """The low-rank terms that a block adds to x W_gate and x W_up in a shared MLP."""

    def __init__(self, features: int, rank: int, mlp_features: int, **options: Any):
        self.down = Linear(features, rank, **options)
        self.gate = Linear(rank, mlp_features, **options)
        self.up = Linear(rank, mlp_features, **options)

    def __call__(self, x):
        """Returns the two terms."""
        x = self.down(x)
        return self.gate(x), self.up(x)

    mesh_axes = last_axis("hidden", "gate", "up") | whole("down")


class Zamba2Transformer(nnx.Module):
    """`mlp(norm(attention(norm([x, e]))))`, without residuals, where e are the token embeddings.

    Several blocks share one. Each of them passes its own adapters and the state of its attention.
    """

    def __init__(self, config: Zamba2LanguageModelConfig, **options: Unpack[LayerOptions]):
        features = config.features
        norm_kwargs = {"epsilon": config.epsilon, **norm_options(options)}
        self.attention_norm = RMSNorm(2 * features, **norm_kwargs)
        self.attention = config.attention(**options)
        self.mlp_norm = RMSNorm(features, **norm_kwargs)
        self.mlp = config.mlp(**options)

    def __call__(
        self,
        x: Float[Array, "batch time features"],
        e: Float[Array, "batch time features"],
        state: Any,
        rows: Rows,
        adapters: tuple[AttentionAdapter | None, MLPAdapter],
    ) -> tuple[Float[Array, "batch time features"], Any]:
        """Returns the output, and the state of the attention after it."""
        attention_adapter, mlp_adapter = adapters
        n = self.attention_norm(jnp.concatenate([x, e], axis=-1))
        y, state = self.attention.sequence(n, state, rows, attention_adapter)
        return self.mlp(self.mlp_norm(y), mlp_adapter), state

    def rows(self) -> Table:
        """The rows of transformers' Zamba2AttentionDecoderLayer, without the adapters."""
        projections = "q_proj", "k_proj", "v_proj", "o_proj"
        return [
            *rms_norm("attention_norm", "input_layernorm"),
            *nested(self.attention.rows(*projections, "", ""), "attention", "self_attn"),
            *rms_norm("mlp_norm", "pre_ff_layernorm"),
            *nested(
                self.mlp.rows("gate_up_proj", "gate_up_proj", "down_proj"), "mlp", "feed_forward"
            ),
        ]


class Zamba2Block(SequenceLayer[Any]):
    """`x ← x + mamba(norm(x))`. The block also passes on the token embeddings e, beside x.

    The input of the lowest block is e alone.
    """

    divides_time = True

    def __init__(
        self,
        config: Zamba2LanguageModelConfig,
        *,
        is_lowest: bool,
        **options: Unpack[LayerOptions],
    ):
        super().__init__((2 - is_lowest) * config.features, **options)
        self.is_lowest = is_lowest
        self.norm = RMSNorm(config.features, epsilon=config.epsilon, **norm_options(options))
        self.mamba = config.mixer(**options)

    def init_state(self, batch_size: int) -> Any:
        """The state of the Mamba-2."""
        return self.mamba.init_state(batch_size)

    def split(self, x):
        """Returns the pair of x and e, or in the lowest block e alone.

        A block that runs by itself receives x and e side by side. A language model splits only the
        input of its lowest block.
        """
        return x if self.is_lowest else tuple(jnp.split(x, 2, axis=-1))

    def streams(self, x: Any) -> Any:
        """Returns x and e in the dtype of the computation."""
        x, e = (x, x) if self.is_lowest else x
        dtype = self.computation_dtype(x)
        return x.astype(dtype), e.astype(dtype)

    def sequence(self, x, state, rows) -> Any:
        """Runs the Mamba-2, and adds its output to x."""
        x, e = self.streams(x)
        y, state = self.mamba.sequence(self.norm(x), state, rows)
        return (x + y, e), state

    def torch_layouts(self) -> Layouts:
        """`hf`: the keys of transformers' Zamba2MambaDecoderLayer."""
        mamba = self.mamba.torch_layouts()["mamba2"]
        return {"hf": [*rms_norm("norm", "input_layernorm"), *nested(mamba, "mamba", "mamba")]}


class Zamba2State(NamedTuple):
    """The state of a block with a shared transformer."""

    mamba: Any
    """A `Mamba2State`."""
    attention: Any
    """A `LocalAttentionState`."""


class Zamba2HybridBlock(Zamba2Block):
    """`x ← x + mamba(norm(x + transformer(x, e) W))`, with a transformer that blocks share.

    The adapters, W, the norm and the Mamba-2 are the block's own.
    """

    def __init__(
        self,
        config: Zamba2LanguageModelConfig,
        transformer: Zamba2Transformer,
        *,
        is_lowest: bool,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(config, is_lowest=is_lowest, **options)
        features, rank = config.features, config.adapter_rank
        matrix = with_inits(options, normal_of_fan_in(), None, use_bias=False)
        self.transformer = transformer
        self.attention_adapter = (
            AttentionAdapter(2 * features, rank, **matrix) if config.attention_adapters else None
        )
        self.mlp_adapter = MLPAdapter(features, rank, config.mlp_features, **matrix)
        self.linear = Linear(features, features, **matrix)

    def init_state(self, batch_size: int) -> Zamba2State:
        """The states of the Mamba-2 and of the attention."""
        attention = self.transformer.attention
        return Zamba2State(self.mamba.init_state(batch_size), attention.init_state(batch_size))

    def start(self, batch_size: int) -> Zamba2State:
        attention = self.transformer.attention
        return Zamba2State(self.mamba.start(batch_size), attention.start(batch_size))

    def sequence(self, x, state, rows) -> Any:
        """Runs the shared transformer, then the Mamba-2, and adds the output of the latter to x."""
        x, e = self.streams(x)
        adapters = self.attention_adapter, self.mlp_adapter
        t, attention = self.transformer(x, e, state.attention, rows, adapters)
        y, mamba = self.mamba.sequence(self.norm(x + self.linear(t)), state.mamba, rows)
        return (x + y, e), Zamba2State(mamba, attention)

    mesh_axes = whole("linear")  # all features of t are added to x

    def torch_layouts(self) -> Layouts:
        """`hf`: the keys of transformers' Zamba2HybridLayer, without those of the adapters."""
        return {
            "hf": [
                *nested(self.transformer.rows(), "transformer", SHARED),
                *linear("linear", "linear", bias=False),
                *nested(super().torch_layouts()["hf"], "", "mamba_decoder"),
            ]
        }

    def adapter_rows(self, number: int) -> Table:
        """The rows of the adapters, which transformers keeps by number in the shared transformer.

        `number` is that of the block among the hybrid ones.
        """
        key = f"{MLP_ADAPTERS}.{number}"
        rows = [
            *linear("mlp_adapter.down", f"{key}.0", bias=False),
            parts(["mlp_adapter.gate.kernel", "mlp_adapter.up.kernel"], f"{key}.1.weight"),
        ]
        for name in "qkv" if self.attention_adapter is not None else "":
            key = f"{ATTENTION_ADAPTERS.format(name)}.{number}"
            rows += linear(f"attention_adapter.{name}.down", f"{key}.0", bias=False)
            rows += linear(f"attention_adapter.{name}.up", f"{key}.1", bias=False)
        return rows


class Zamba2LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2, some with a shared transformer, too → RMSNorm → head.

        >>> model = Zamba2LanguageModelConfig(features=64, num_heads=2, num_kv_heads=2).build(
        ...     rngs=nnx.Rngs(0)
        ... )
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x = e = embedding(tokens)
        t = mlp(norm(attention(norm([x, e])))) W     in hybrid blocks, otherwise 0
        x ← x + mamba(norm(x + t))
        logits = head(norm(x))

    The norms, the `Attention` and the `GatedMLP` with gelu that give t are one of
    num_shared_blocks shared transformers, which the hybrid blocks use in turns. Its parameters
    exist once, and their gradients are the sums over these blocks. Each block has a W and low-rank
    adapters of its own: `x W_down W_up` is added to the projections of the MLP and, with
    attention_adapters, to queries, keys and values. The heads of the attention have
    d = 2 · features / num_heads features, and scores are divided by √(d / 2). With a rope_theta,
    queries and keys are rotated. The head is the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `Zamba2LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, and the other parameters start as in `Mamba2`, as in transformers.

    Layouts: `hf` (transformers' Zamba2ForCausalLM, whose `state_dict` has the weights of a shared
    transformer under the keys of each of its blocks) and `hf-file` (the files that it saves, which
    have them under those of the first, and which lack `lm_head.weight` if the head is tied).

    Source: Glorioso et al. 2024 (arXiv 2411.15242); transformers' Zamba2ForCausalLM.

    """

    config: Zamba2LanguageModelConfig

    def torch_layouts(self) -> Layouts:
        """Adds the adapters, whose keys are those of all blocks with the same transformer."""
        layouts, count = super().torch_layouts(), self.config.num_shared_blocks
        blocks: Any = self.blocks
        hybrids = {i: b for i, b in enumerate(blocks) if isinstance(b, Zamba2HybridBlock)}
        for name, table in layouts.items():
            layout = self.config.layouts[name]
            for number, (i, block) in enumerate(hybrids.items()):
                sharing = [*hybrids][number % count :: count]  # the blocks with its transformer
                places = [f"{layout.blocks}.{j}" for j in sharing]
                for row in block.adapter_rows(number):
                    keys = tuple(join(place, key) for place in places for key in row.keys)
                    written = len(keys) if self.repeats_tied(layout) else 1
                    table.append(repeated(row.within(f"blocks.{i}", ""), keys, written))
        return layouts
