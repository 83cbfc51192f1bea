"""What the hybrids of Mamba-2 and attention share: their config, and how it is read from keys."""

__all__: list[str] = []  # only the modules of the models import it

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from jax_models.checks.values import check_divides
from jax_models.layers.attention import Attention
from jax_models.layers.mamba2 import Mamba2, checked_limits
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import FULL, LINEAR, HybridConfig, attention_sizes
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of


@dataclasses.dataclass(frozen=True)
class Mamba2HybridConfig(HybridConfig):
    """The base class of the configs of hybrids with Mamba-2."""

    kinds: ClassVar = (LINEAR, FULL)
    float32_keys: ClassVar = tuple(f".mamba.{name}" for name in ("A_log", "D", "dt_bias"))
    hf_fields: ClassVar = HybridConfig.hf_fields | {
        "attention_bias": "attention_bias",
        "mamba_n_heads": "mamba_heads",
        "mamba_d_head": "mamba_head_features",
        "mamba_d_state": "state_features",
        "mamba_n_groups": "num_groups",
        "mamba_d_conv": "kernel_size",
        "mamba_proj_bias": "mamba_bias",
        "mamba_conv_bias": "conv_bias",
        "time_step_limit": "dt_limits",
    }
    hf_values: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "attention_dropout": (0,),
        "rope_type": ("default",),
        "tie_word_embeddings": (False, True),
    }
    hf_defaults: ClassVar = {"mamba_n_heads": 128, "mamba_d_state": 256, "mamba_expand": 2}

    block_types: tuple[str, ...] = (LINEAR,) * 3 + (FULL,)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    mamba_heads: int = 8
    """Number of heads of a Mamba-2."""
    mamba_head_features: int = 48
    """Size of a head of a Mamba-2."""
    state_features: int = 64
    """Size of the state of each feature of a Mamba-2's head."""
    num_groups: int = 1
    """Number of groups of a Mamba-2's heads that share B and C."""
    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    mamba_bias: bool = False
    """Whether the projections of a Mamba-2 have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest Δ."""
    attention_bias: bool = False
    """Whether the projections of the attention have biases."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dt_limits", checked_limits("dt_limits", self.dt_limits))

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in sizes that depend on others."""
        inner, heads = cls.inner_features(given, config), given["mamba_n_heads"]
        size = given.get("mamba_d_head", "auto")
        if size == "auto":
            check_divides("config: number of heads of a Mamba-2", heads, "its width", inner)
            size = inner // heads
        if size * heads != inner:
            raise ValueError(
                "config: mamba_d_head: expected the width of the Mamba-2 / mamba_n_heads = "
                f"{inner} / {heads}, got {size}"
            )
        return super().converted(given, config) | {"mamba_head_features": size}

    @classmethod
    def inner_features(cls, given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """The size of all heads of a Mamba-2 together."""
        return given["mamba_expand"] * given["hidden_size"]

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | self.inner_to_hf()

    def inner_to_hf(self) -> dict[str, Any]:
        """The field of the config.json from which `inner_features` reads this size."""
        return {"mamba_expand": self.expansion("mamba_heads", "mamba_head_features")}

    def attention(self, **options: Any) -> SequenceLayer:
        bias = self.attention_bias
        return super().attention(use_bias=bias, out_bias=bias, epsilon=None, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        return self.make(
            Mamba2,
            num_heads=self.mamba_heads,
            head_features=self.mamba_head_features,
            use_bias=self.mamba_bias,
            dt_init=nnx.initializers.ones,
            **options,
        )


def mamba2_sizes(
    checkpoint: Checkpoint,
    mixer: str,
    heads: str = "mamba_heads",
    size: str = "mamba_head_features",
) -> Fields:
    """Reads the sizes of a Mamba-2, which has this name in the keys of a block.

    The fields with the number and the size of its heads have the names `heads` and `size`.
    """
    num_heads = checkpoint.size(f"*.{mixer}.A_log", 0, rank=1)
    inner = checkpoint.size(f"*.{mixer}.out_proj.weight", 1, rank=2)
    # The convolution has the channels of the heads, and of B and C for each group.
    channels = checkpoint.size(f"*.{mixer}.conv1d.weight", 0, rank=3)
    num_groups = checkpoint.given("num_groups")
    return {
        heads: num_heads,
        size: inner // num_heads,
        "num_groups": num_groups,
        "state_features": (channels - inner) // (2 * num_groups),
        "kernel_size": checkpoint.size(f"*.{mixer}.conv1d.weight", 2, rank=3),
        "conv_bias": checkpoint.has(f"*.{mixer}.conv1d.bias"),
    }


def mamba2_hybrid_sizes(checkpoint: Checkpoint, attention: str, mamba: str) -> Fields:
    """Reads the fields of a `Mamba2HybridConfig`, except for the MLP's width.

    The two mixers have these names in the keys of a block.
    """
    return {
        "block_types": kinds_by_key(checkpoint, f"*.{mamba}.A_log", LINEAR, FULL),
        **attention_sizes(checkpoint, attention),
        "attention_bias": checkpoint.has(f"*.{attention}.q_proj.bias"),
        **(mamba2_sizes(checkpoint, mamba) if checkpoint.has(f"*.{mamba}.A_log") else {}),
        "mamba_bias": checkpoint.has(f"*.{mamba}.in_proj.bias"),
        "tied_head": checkpoint.tied_head,
    }


@layouts_of(Attention)
def attention_layouts(attention: Attention) -> Layouts:
    """`llama`: the keys of transformers' LlamaAttention, which has no norms."""
    if attention.qk_norm is not None:
        return {}
    return {"llama": attention.rows("q_proj", "k_proj", "v_proj", "o_proj", "", "")}
