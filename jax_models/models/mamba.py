"""The language models Mamba (arXiv 2312.00752) and FalconMamba, also of the package mamba_ssm."""

__all__ = ["MambaLanguageModel", "MambaLanguageModelConfig"]

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

from flax import nnx

from jax_models.checks.values import Positive
from jax_models.layers.linear import torch_uniform
from jax_models.layers.mamba import Mamba
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.state_space import (
    StateSpaceConfig,
    StateSpaceLanguageModel,
    state_space_layouts,
)
from jax_models.options import NormOptions


def _sizes(checkpoint: Checkpoint) -> Fields:
    return {
        "inner_features": checkpoint.size("*.mixer.A_log", 0, rank=2),
        "state_features": checkpoint.size("*.mixer.A_log", 1, rank=2),
        "dt_rank": checkpoint.size("*.mixer.dt_proj.weight", 1, rank=2),
        "mixer_norm": checkpoint.given("mixer_norm"),
    }


@dataclasses.dataclass(frozen=True)
class MambaLanguageModelConfig(StateSpaceConfig):
    """The config of Mamba and FalconMamba. Except for sizes, defaults are those of transformers."""

    family: ClassVar = "Mamba"
    model_types: ClassVar = ("mamba", "falcon_mamba")
    marks: ClassVar = (".mixer.x_proj.weight",)
    float32_keys: ClassVar = tuple(f".mixer.{name}" for name in ("A_log", "D", "dt_proj.bias"))
    layouts: ClassVar = state_space_layouts("mamba", _sizes)
    hf_class: ClassVar = "MambaForCausalLM"
    hf_fields: ClassVar = StateSpaceConfig.hf_fields | {
        "intermediate_size": "inner_features",
        "time_step_rank": "dt_rank",
        "time_step_scale": "dt_scale",
        "time_step_init_scheme": "dt_scheme",
        "mixer_rms_eps": "mixer_epsilon",
    }
    presets: ClassVar = {"mamba": {}}

    inner_features: int = 384
    """Number of channels of each block."""
    state_features: int = 16
    """Size of the state of each channel."""
    dt_rank: int = 12
    """Size of the projection from which Δ is computed."""
    dt_scale: Positive = 1.0
    """A factor of the initial matrices from which Δ is computed."""
    dt_scheme: Literal["random", "constant"] = "random"
    """Whether these matrices start with uniform random numbers, or with a constant."""
    mixer_norm: bool = False
    """Whether δ, B and C pass norms without scales, as in FalconMamba."""
    mixer_epsilon: Positive = 1e-6
    """ε of these norms."""
    tied_head: bool = True
    """Whether the head shares the embedding's weights."""

    @classmethod
    def options_of_mamba_ssm(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        return super().options_of_mamba_ssm(fields) | {"mixer_norm": False}

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """FalconMamba-7B states an `expand` that its `intermediate_size` overrides."""
        features, rank = given["hidden_size"], given.get("time_step_rank", "auto")
        inner = given.get("intermediate_size", int(given.get("expand", 2) * features))
        return {
            "inner_features": inner,
            "dt_rank": math.ceil(features / 16) if rank == "auto" else rank,
            "mixer_norm": config["model_type"] == "falcon_mamba",
        }

    def to_hf(self) -> dict[str, Any]:
        fields = super().to_hf() | {"expand": max(self.inner_features // self.features, 1)}
        if self.mixer_norm:
            name = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
            return fields | name
        del fields["mixer_rms_eps"]
        return fields

    def make_mixer(self, **options: Any) -> Mamba:
        inits = self.mixer_inits(self.inner_features)
        bound = self.dt_scale * self.dt_rank**-0.5
        constant = self.dt_scheme == "constant"
        inits["dt_kernel_init"] = (
            nnx.initializers.constant(bound) if constant else torch_uniform(bound**-2)
        )
        norm = {"norm": "plain" if self.mixer_norm else None, "epsilon": self.mixer_epsilon}
        return self.make(Mamba, **inits, **norm, **options)

    def build(self, **options: Unpack[NormOptions]) -> "MambaLanguageModel":
        return MambaLanguageModel(self, **options)


class MambaLanguageModel(StateSpaceLanguageModel):
    """Token embedding → blocks with a `Mamba` each → RMSNorm → Linear.

        >>> config = MambaLanguageModelConfig(features=64, inner_features=128)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x))

    Args:
        config: the sizes. `MambaLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Embeddings and input projections are drawn from a normal
            distribution, and the other parameters start as in `Mamba`, as in transformers.

    Layouts: `hf` (transformers' MambaForCausalLM and FalconMambaForCausalLM), `hf-file` (the same
    without `lm_head.weight` if the head is tied) and `mamba_ssm` (the models of the package
    mamba_ssm).

    """

    config: MambaLanguageModelConfig
