"""The parts that the hybrids of attention with other mixers share."""

__all__: list[str] = []  # only the modules of the models import it

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, Unpack

from flax import nnx
from jaxtyping import Array, Float

from jax_models.checks.values import NotNegative, Positive
from jax_models.layers.attention import Attention
from jax_models.layers.experts import Experts
from jax_models.layers.gated_delta_net import GatedDeltaNet
from jax_models.layers.linear import Linear
from jax_models.layers.load_balancing import load_balancing_loss
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RMSNorm
from jax_models.layers.residual import Map, ResidualBlock
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.hf import PatternConfig, shortest_pattern
from jax_models.models.language_model import LanguageModel
from jax_models.ops import Rows
from jax_models.options import Index, LayerOptions, NormOptions, norm_options
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, linear, nested, rms_norm

FULL = "full_attention"
"""The kind of the blocks with attention."""
SLIDING = "sliding_attention"
"""The kind of the blocks with attention over a window."""
LINEAR = "linear_attention"
"""The kind of the blocks with a Gated DeltaNet or a Mamba-2."""
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
"""The names that files from before transformers 5 have for the kinds of blocks."""
HEAD = "lm_head.weight"


class ExpertsKeys(NamedTuple):
    """The keys of a mixture of experts in a block of a checkpoint.

    `Experts.rows` describes those of the router, the bias and the experts' matrices.
    """

    router: str
    gate: str | None
    up: str
    down: str
    expert_bias: str | None = None
    shared: str = ""
    """The key of the shared expert, whose projections have the keys of an MLP's projections."""
    shared_gate: str = ""


class BlockKeys(NamedTuple):
    """The keys of the parts of a block in a checkpoint."""

    mixer: str
    norm: str
    mlp_norm: str
    layout: str
    """The layout of the mixer, which the model's file declares (`layouts_of`)."""
    mlp: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The keys of the MLP's projections: those to the gate and up, and the one down. The first two
    are equal if a single matrix holds both.
    """
    experts: ExpertsKeys | None = None
    """The keys of the mixture of experts that some models have instead of the MLP."""
    out_norms: tuple[str, str] = ("", "")
    """The keys of the norms after the mixer and after the MLP of a block with sandwich norms."""


@dataclasses.dataclass(frozen=True)
class HybridConfig(PatternConfig):
    """The base class of the configs of hybrids. Some of their blocks have attention."""

    norm: ClassVar[Callable[..., nnx.Module]] = RMSNorm
    block_keys: ClassVar[Mapping[str, Mapping[str, BlockKeys]]]
    """The keys of each kind of block in each layout of the blocks."""
    post_normed: ClassVar[tuple[str, ...]] = ()
    """The kinds of blocks whose norms follow the mixer and the MLP."""
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "mlp_features",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_features",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "epsilon",
        "tie_word_embeddings": "tied_head",
        "initializer_range": "initializer_range",
    }

    num_layers: int = 4
    """Number of residual blocks."""
    mlp_features: int = 512
    """Width of the gated MLPs."""
    block_types: tuple[str, ...] = (FULL,)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    num_heads: int = 4
    """Number of heads of the attention's queries."""
    num_kv_heads: int = 2
    """Number of heads of the attention's keys and values."""
    head_features: int | None = None
    """Size of a head of the attention. None: features / num_heads."""
    rope_theta: Positive | None = 10_000.0
    """θ of `ops.rotary`."""
    epsilon: Positive = 1e-6
    """ε of the norms."""
    tied_head: bool = True
    """Whether the head shares the embedding's weights."""
    initializer_range: Positive = 0.02
    """The standard deviation of the initial matrices."""
    max_length: int | None = None
    """The length of the longest document that a state can hold, because the attention keeps the
    keys of all its steps. It determines the memory of a state, but not the time of a step. None:
    `generate` sets it, and so does `nnx.view(model, max_length=…)`.
    """

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        types, num_layers = cls.layer_types(given), given["num_hidden_layers"]
        if not isinstance(types, list) or any(kind not in cls.kinds for kind in types):
            raise ValueError(f"config: layer_types: expected some of {cls.kinds}, got {types}")
        if len(types) != num_layers:
            raise ValueError(
                f"config: layer_types: expected num_hidden_layers={num_layers} entries, got "
                f"{len(types)}"
            )
        fields: dict[str, Any] = {"block_types": shortest_pattern(types)}
        if (name := "num_key_value_heads") in cls.hf_fields:
            # If it is null, it is the number of heads of queries, not the default.
            heads = config.get(name, given.get(name)) or given["num_attention_heads"]
            fields["num_kv_heads"] = heads
        return fields

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block, by default attention in every fourth block."""
        interval = given.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"config: full_attention_interval: expected a positive integer, got {interval}"
            )
        kinds = [cls.kinds[(i + 1) % interval == 0] for i in range(given["num_hidden_layers"])]
        return given.get("layer_types", kinds)

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf() | {"layer_types": self.mixings}
        # If transformers has a default for the size of a head, that is not features / num_heads.
        return fields | ({"head_dim": self.head_size} if "head_dim" in self.hf_defaults else {})

    @property
    def head_size(self) -> int:
        """The size of a head of the attention, also if `head_features` is None."""
        return self.head_features or self.features // self.num_heads

    def blocks(self, **options: Unpack[LayerOptions]) -> list[SequenceLayer]:
        """Builds all blocks, from the lowest up."""
        return [self.block(kind, i, **options) for i, kind in enumerate(self.mixings)]

    def block(self, kind: str, number: int, **options: Unpack[LayerOptions]) -> "HybridBlock":
        """Builds the block with this number, which is of this kind."""
        build = {FULL: self.attention, SLIDING: self.sliding_attention}.get(kind, self.mixer)
        others: dict[str, Any] = {"norms_outputs": True} if kind in self.post_normed else {}
        return self.block_of(build(**options), kind, number, **others, **options)

    def block_of(
        self, mixer: SequenceLayer, kind: str, number: int, **options: Any
    ) -> "HybridBlock":
        """Builds the block with this number from its mixer. `options` may be of its class alone."""
        return self.block_class(
            mixer,
            self.experts if self.has_experts(number) else self.mlp,
            partial(self.norm, epsilon=self.epsilon),
            keys={layout: kinds[kind] for layout, kinds in self.block_keys.items()},
            **options,
        )

    @property
    def block_class(self) -> "Callable[..., HybridBlock]":
        """The class of the blocks."""
        return HybridBlock

    def attention(self, **options: Any) -> SequenceLayer:
        """Builds the mixer of a block with attention."""
        return self.make(Attention, **options)

    def sliding_attention(self, **options: Any) -> SequenceLayer:
        """Builds the mixer of a block with attention over a window."""
        raise NotImplementedError  # a `WindowConfig` builds it

    def mixer(self, **options: Any) -> SequenceLayer:
        """Builds the mixer of any other block."""
        raise NotImplementedError  # a subclass builds it

    def has_experts(self, number: int) -> bool:
        """Whether the block with this number has a mixture of experts instead of an MLP."""
        return False

    def mlp(self, **options: Any) -> GatedMLP:
        """Builds the MLP of a block."""
        return GatedMLP(self.features, self.mlp_features, activation="silu", **options)

    def experts(self, **options: Any) -> Experts:
        """Builds the mixture of experts of a block."""
        raise NotImplementedError  # a subclass builds it


@dataclasses.dataclass(frozen=True)
class WindowConfig(HybridConfig):
    """The base class of the configs of hybrids with attention over a window in some blocks."""

    window: int = 256
    """The number of steps that each step of this attention sees, including itself."""

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses a window of null if some blocks have one."""
        fields = super().converted(given, config)
        window = config.get("sliding_window", cls.window)
        if window is None and SLIDING in fields["block_types"]:
            raise ValueError(
                f"config: sliding_window: expected an integer, because layer_types has {SLIDING}, "
                "got None"
            )
        return fields | ({} if window is None else {"window": window})

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(**{"window": None} | options)

    def sliding_attention(self, **options: Any) -> SequenceLayer:
        return self.attention(window=self.window, max_length=None, **options)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig(HybridConfig):
    """The base class of the configs of hybrids that may have experts instead of MLPs."""

    num_experts: Index = 0
    """Number of experts in a block, without a shared one. 0: all blocks have MLPs."""
    experts_per_token: int = 2
    """Number of experts that are chosen for each token."""
    expert_features: int = 128
    """Width of each of these experts."""

    def has_experts(self, number: int) -> bool:
        return self.num_experts > 0

    def experts(self, **options: Any) -> Experts:
        sizes = self.features, self.expert_features, self.num_experts, self.experts_per_token
        return Experts(*sizes, **options)


@dataclasses.dataclass(frozen=True)
class SigmoidExpertsConfig(ExpertsConfig):
    """The base class of the configs of hybrids whose routers score experts with a sigmoid."""

    experts_scale: Positive = 1.0
    """The factor of the weights of the experts."""
    normalize_experts: bool = True
    """Whether the weights of a token's experts are divided by their sum."""

    def experts(self, **options: Any) -> Experts:
        weights = {"normalize": self.normalize_experts, "scale": self.experts_scale}
        return super().experts(scores="sigmoid", **weights, **options)


@dataclasses.dataclass(frozen=True)
class GroupedExpertsConfig(SigmoidExpertsConfig):
    """The base class of the configs of hybrids that choose experts from the best groups.

    A bias, which training leaves alone, influences the choice.
    """

    num_expert_groups: int = 1
    """Number of groups of experts."""
    expert_groups_per_token: int = 1
    """Number of groups from which the experts of a token are chosen."""

    def experts(self, **options: Any) -> Experts:
        groups = {
            "num_groups": self.num_expert_groups,
            "groups_per_token": self.expert_groups_per_token,
        }
        return super().experts(use_expert_bias=True, **groups, **options)


@dataclasses.dataclass(frozen=True)
class BalancedExpertsConfig(ExpertsConfig):
    """The base class of the configs of hybrids whose training may balance the experts."""

    balance_experts: bool = False
    """Whether training adds the loss that balances the load of the experts, `model.losses`."""
    balance_coefficient: NotNegative = 0.001
    """The factor of this loss."""

    def __post_init__(self):
        """Checks each field, and that there are experts to balance."""
        super().__post_init__()
        if self.balance_experts and not self.any_experts:
            raise ValueError("balance_experts: expected False in a model without experts, got True")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config.json, which may ask to balance experts although the model has none."""
        # Only the config shows whether there are experts, and it refuses to balance none.
        unbalanced = super().from_hf({**config, "output_router_logits": False})
        return super().from_hf(config) if unbalanced.any_experts else unbalanced

    @property
    def any_experts(self) -> bool:
        """Whether a block has experts."""
        return any(map(self.has_experts, range(self.num_layers)))

    @property
    def has_balance_loss(self) -> bool:
        """Whether the model has this loss."""
        return self.balance_experts and self.balance_coefficient != 0

    def experts(self, **options: Any) -> Experts:
        return super().experts(track_load=self.has_balance_loss, **options)


BALANCE_FIELDS = {
    "output_router_logits": "balance_experts",
    "router_aux_loss_coef": "balance_coefficient",
}
"""The fields of a config.json, and the fields of a `BalancedExpertsConfig` that they set."""


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(HybridConfig):
    """The base class of the configs of hybrids with Gated DeltaNet."""

    kinds: ClassVar = (LINEAR, FULL)
    float32_keys: ClassVar = tuple(
        f".linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight", "o_norm.weight")
    )
    hf_fields: ClassVar = HybridConfig.hf_fields | {
        "attention_bias": "attention_bias",
        "linear_num_key_heads": "num_key_heads",
        "linear_num_value_heads": "num_value_heads",
        "linear_key_head_dim": "key_features",
        "linear_value_head_dim": "value_features",
        "linear_conv_kernel_dim": "kernel_size",
    }
    hf_values: ClassVar = {
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
        "rope_type": ("default",),
        "tie_word_embeddings": (False, True),
    }

    block_types: tuple[str, ...] = (LINEAR,) * 3 + (FULL,)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    num_key_heads: int = 4
    """Number of heads of a Gated DeltaNet's queries and keys."""
    num_value_heads: int = 4
    """Number of heads of a Gated DeltaNet's values."""
    key_features: int = 32
    """Size of a head of a Gated DeltaNet's queries and keys."""
    value_features: int = 48
    """Size of a head of a Gated DeltaNet's values."""
    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    attention_bias: bool = False
    """Whether the projections of the attention have biases."""

    def attention(self, **options: Any) -> SequenceLayer:
        bias = self.attention_bias
        return super().attention(use_bias=bias, out_bias=bias, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        return self.make(GatedDeltaNet, **options)


class HybridBlock(ResidualBlock[Any]):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`, with a gated MLP or with experts.

    With `norms_outputs`, `x ← x + norm(mixer(x))`, then `x ← x + norm(mlp(x))`. With
    `sandwich_norm`, `x ← x + norm(mixer(norm(x)))`, then `x ← x + norm(mlp(norm(x)))`. `keys` has
    the keys of the parts in each layout.
    """

    parts = ("mixer_norm", "mixer", "mlp_norm", "mlp")

    def __init__(
        self,
        mixer: SequenceLayer,
        mlp: Callable[..., GatedMLP | Experts],
        norm: Callable[..., Any],
        *,
        keys: Mapping[str, BlockKeys],
        norms_outputs: bool = False,
        sandwich_norm: bool = False,
        **options: Unpack[LayerOptions],
    ):
        features = mixer.in_features
        super().__init__(features, **options)
        self.norms_outputs, self.keys = norms_outputs, tuple(keys.items())
        self.mixer_norm = norm(features, **norm_options(options))
        self.mixer = mixer
        self.mlp_norm = norm(features, **norm_options(options))
        self.mlp = mlp(**options)
        self.mixer_out_norm, self.mlp_out_norm = (
            norm(features, **norm_options(options)) if sandwich_norm else None for _ in range(2)
        )

    def sequence(self, x, state, rows):
        """Runs the mixer, then the MLP, each with its norms and added to its input."""
        if self.mixer_out_norm is None or self.mlp_out_norm is None:
            return super().sequence(x, state, rows)
        x, scale = x.astype(self.computation_dtype(x)), self.residual_scale
        y, state = self.mixer.sequence(self.mixer_norm(x), state, rows)
        x = x + scale * self.mixer_out_norm(y)
        return x + scale * self.mlp_out_norm(self.mlp_of(rows)(self.mlp_norm(x))), state

    def mlp_of(self, rows: Rows) -> Map:
        """The MLP, or the experts with the mask of the real tokens."""
        return partial(self.mlp, active=rows.active) if isinstance(self.mlp, Experts) else self.mlp

    def torch_layouts(self) -> Layouts:
        """The layouts of `keys`."""
        mixer_layouts = self.mixer.torch_layouts()
        return {
            layout: [
                *rms_norm("mixer_norm", keys.norm),
                *nested(mixer_layouts[keys.layout], "mixer", keys.mixer),
                *rms_norm("mlp_norm", keys.mlp_norm),
                *self._mlp_rows(keys),
                *self._out_norm_rows(keys),
            ]
            for layout, keys in self.keys
        }

    def _out_norm_rows(self, keys: BlockKeys) -> Table:
        """The rows of the norms after the mixer and after the MLP."""
        if self.mixer_out_norm is None:
            return []
        mixer, mlp = keys.out_norms
        return rms_norm("mixer_out_norm", mixer) + rms_norm("mlp_out_norm", mlp)

    def _mlp_rows(self, keys: BlockKeys) -> Table:
        """The rows of the MLP or of the mixture of experts."""
        mlp, experts = self.mlp, keys.experts
        if not isinstance(mlp, Experts):
            return nested(mlp.rows(*keys.projections), "mlp", keys.mlp)
        assert experts is not None
        router, gate, up, down, bias, shared, shared_gate = experts
        bias = None if mlp.expert_bias is None else bias
        rows = nested(mlp.rows(router, gate, up, down, bias), "mlp", "")
        if mlp.shared is not None:
            rows += nested(mlp.shared.rows(*keys.projections), "mlp.shared", shared)
        if mlp.shared_gate is not None:
            rows += linear("mlp.shared_gate", shared_gate, bias=False)
        return rows


class HybridLanguageModel(LanguageModel):
    """Token embedding → residual blocks → RMSNorm → the token embedding again, or Linear."""

    def __init__(self, config: HybridConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.initializer_range)
        sizes, matrix = (config.vocab_size, config.features), {"kernel_init": init, **options}
        super().__init__(
            config,
            embedding=nnx.Embed(*sizes, embedding_init=init, **options),
            blocks=config.blocks(**matrix),
            norm=config.norm(config.features, epsilon=config.epsilon, **options),
            head=None if config.tied_head else Linear(*sizes[::-1], use_bias=False, **matrix),
        )

    @property
    def losses(self) -> dict[str, Float[Array, ""]]:
        """The loss that balances the experts of a `BalancedExpertsConfig`, times its factor."""
        config = self.config
        if not isinstance(config, BalancedExpertsConfig) or not config.has_balance_loss:
            return super().losses
        return {"balance_loss": config.balance_coefficient * load_balancing_loss(self)}


def model_layouts(
    model: str,
    norm: str,
    sizes: Callable[[Checkpoint], Fields],
    file_sizes: Callable[[Checkpoint], Fields] | None = None,
    blocks_layout: str = "hf",
) -> tuple[Layout, Layout]:
    """Returns the layouts of the `state_dict` and of the saved files, under the prefix `model`.

    If the head is tied, files leave out its key, and those of layers that an earlier block shares.
    With `file_sizes`, the blocks have other keys in files: their layout is `blocks_layout` with the
    ending `-file`.
    """
    layout = Layout(
        f"{model}.embed_tokens.weight",
        f"{model}.layers",
        f"{model}.{norm}.weight",
        HEAD,
        blocks_layout=blocks_layout,
        sizes=sizes,
    )
    file = layout._replace(repeats_embedding=False)
    if file_sizes is not None:
        file = file._replace(blocks_layout=f"{blocks_layout}-file", sizes=file_sizes)
    return layout, file


def attention_sizes(
    checkpoint: Checkpoint, mixer: str, norm: str | None = None, parts: int = 1
) -> Fields:
    """Reads the heads of the attention, which has this name in the keys of a block.

    `norm` is the name of the norm of the query heads, whose size is `head_features`. If it is None,
    the user must pass `num_heads`. `parts` is the number of equal parts of the queries' matrix,
    which are two with an output gate.
    """
    num_heads = None if norm else checkpoint.given("num_heads")
    queries, keys = (f"*.{mixer}.{name}_proj.weight" for name in "qk")
    if not checkpoint.has(queries):
        return {}
    size = checkpoint.size(queries, 0, rank=2) // parts
    if num_heads is None:
        head_features = checkpoint.size(f"*.{mixer}.{norm}.weight", 0, rank=1)
    else:
        if size % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of the {size} rows of {queries}, got {num_heads}"
            )
        head_features = size // num_heads
    return {
        "num_heads": size // head_features,
        "head_features": head_features,
        "num_kv_heads": checkpoint.size(keys, 0, rank=2) // head_features,
    }


def experts_sizes(checkpoint: Checkpoint, experts: ExpertsKeys) -> Fields:
    """Reads the fields of an `ExpertsConfig` from the weights with these keys."""
    router = f"*.{experts.router}"
    if not checkpoint.has(router):
        return {"num_experts": 0}
    return {
        "num_experts": checkpoint.size(router, 0, rank=2),
        "experts_per_token": checkpoint.given("experts_per_token"),
        "expert_features": checkpoint.size(f"*.{experts.down.format(0)}", -1),
    }
