"""The Mamba-2 language model (arXiv 2405.21060), of transformers and of the package mamba_ssm."""

__all__ = ["Mamba2LanguageModel", "Mamba2LanguageModelConfig"]

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from jax_models.layers.mamba2 import Mamba2, checked_limits
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.mamba2_hybrid import mamba2_sizes
from jax_models.models.nemotron_h import OTHER_MIXERS
from jax_models.models.state_space import (
    StateSpaceConfig,
    StateSpaceLanguageModel,
    state_space_layouts,
)
from jax_models.options import NormOptions


def _sizes(checkpoint: Checkpoint) -> Fields:
    return mamba2_sizes(checkpoint, "mixer", "num_heads", "head_features")


@dataclasses.dataclass(frozen=True)
class Mamba2LanguageModelConfig(StateSpaceConfig):
    """The config of Mamba-2. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Mamba-2"
    model_types: ClassVar = ("mamba2",)
    marks: ClassVar = (Mark((".mixer.dt_bias",), lacks=OTHER_MIXERS),)
    float32_keys: ClassVar = tuple(f".mixer.{name}" for name in ("A_log", "D", "dt_bias"))
    layouts: ClassVar = state_space_layouts("mamba2", _sizes)
    hf_class: ClassVar = "Mamba2ForCausalLM"
    hf_fields: ClassVar = StateSpaceConfig.hf_fields | {
        "num_heads": "num_heads",
        "head_dim": "head_features",
        "n_groups": "num_groups",
        "time_step_limit": "dt_limits",
    }
    hf_sizes: ClassVar = (*StateSpaceConfig.hf_sizes, "num_heads", "head_dim", "n_groups")
    presets: ClassVar = {"mamba2": {}}

    num_heads: int = 6
    """Number of heads of each block."""
    head_features: int = 64
    """Size of a head."""
    state_features: int = 64
    """Size of the state of each feature of a head."""
    num_groups: int = 1
    """Number of groups of heads that share B and C."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest Δ."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dt_limits", checked_limits("dt_limits", self.dt_limits))

    @classmethod
    def options_of_mamba_ssm(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        layer = fields.get("ssm_cfg") or {}
        return super().options_of_mamba_ssm(fields) | {
            "num_groups": layer.get("ngroups", 1),
            "dt_limits": layer.get("dt_limit", cls.dt_limits),
        }

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        inner = given["num_heads"] * given["head_dim"]
        if "expand" in given and int(given["expand"] * given["hidden_size"]) != inner:
            raise ValueError(
                f"config: expand: expected num_heads · head_dim / hidden_size = {inner} / "
                f"{given['hidden_size']}, got {given['expand']}"
            )
        return {}

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"expand": self.expansion("num_heads", "head_features")}

    def make_mixer(self, **options: Any) -> Mamba2:
        inits = self.mixer_inits(self.num_heads * self.head_features)
        return self.make(Mamba2, **inits, **options)

    def build(self, **options: Unpack[NormOptions]) -> "Mamba2LanguageModel":
        return Mamba2LanguageModel(self, **options)


class Mamba2LanguageModel(StateSpaceLanguageModel):
    """Token embedding → blocks with a `Mamba2` each → RMSNorm → Linear.

        >>> model = Mamba2LanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x))

    Args:
        config: the sizes. `Mamba2LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Embeddings and input projections are drawn from a normal
            distribution, and the other parameters start as in `Mamba2`, as in transformers.

    Layouts: `hf` (transformers' Mamba2ForCausalLM), `hf-file` (the same without `lm_head.weight` if
    the head is tied) and `mamba_ssm` (the models of the package mamba_ssm).

    """

    config: Mamba2LanguageModelConfig
