"""Qwen3-Next: the mixers of Qwen3.5, and experts in all blocks or in some."""

__all__ = ["Qwen3NextLanguageModel", "Qwen3NextLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.layers.experts import Experts
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hybrid import (
    ExpertsKeys,
    experts_sizes,
    model_layouts,
)
from jax_models.models.qwen3_5 import (
    DEFAULTS,
    EXPERTS,
    EXPERTS_FIELDS,
    FILE_EXPERTS,
    HF_FIELDS,
    Qwen35LanguageModel,
    Qwen35LanguageModelConfig,
    block_keys,
    mixer_sizes,
)
from jax_models.options import Index, NormOptions


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    fields = {**mixer_sizes(checkpoint), **experts_sizes(checkpoint, experts)}
    for name, mlp in (("mlp_features", "mlp"), ("shared_features", experts.shared)):
        if checkpoint.has(key := f"*.{mlp}.gate_proj.weight"):
            fields[name] = checkpoint.size(key, 0)
    if fields["num_experts"]:
        routers = checkpoint.in_blocks(f"*.{experts.router}")
        fields["dense_layers"] = tuple(i for i, there in enumerate(routers) if not there)
    return fields


SIZES, FILE_SIZES = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class Qwen3NextLanguageModelConfig(Qwen35LanguageModelConfig):
    """The config of Qwen3-Next. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Qwen3-Next"
    model_types: ClassVar = ("qwen3_next",)
    marks: ClassVar = (".linear_attn.in_proj_qkvz.",)
    left_out: ClassVar = ("mtp.",)
    block_keys: ClassVar = {
        "hf": block_keys("qwen3_next", EXPERTS),
        "hf-file": block_keys("qwen3_next", FILE_EXPERTS),
    }
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "Qwen3NextForCausalLM"
    hf_fields: ClassVar = {
        **HF_FIELDS,
        **EXPERTS_FIELDS,
        "shared_expert_intermediate_size": "shared_features",
        "norm_topk_prob": "normalize_experts",
        "mlp_only_layers": "dense_layers",
    }
    hf_defaults: ClassVar = {
        **DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    hf_experts: ClassVar = None
    published: ClassVar = {}
    presets: ClassVar = {"qwen3_next": {}}

    mlp_features: int = 512
    """Width of the gated MLPs of the blocks without experts."""
    num_experts: Index = 8
    """Number of experts in a block, without the shared one. 0: all blocks have MLPs."""
    shared_features: int = 128
    """Width of the shared expert of all tokens."""
    normalize_experts: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """The numbers of the blocks that have MLPs even if all other blocks have experts."""

    def __post_init__(self):
        super().__post_init__()
        numbers = self.dense_layers
        is_list = isinstance(numbers, list | tuple)
        if not is_list or any(type(i) is not int or i < 0 for i in numbers):
            raise ValueError(f"dense_layers: expected the numbers of blocks, got {numbers!r}")
        object.__setattr__(self, "dense_layers", tuple(numbers))

    def build(self, **options: Unpack[NormOptions]) -> "Qwen3NextLanguageModel":
        return Qwen3NextLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Finds the blocks without experts: those listed, and all but every `step`-th."""
        step, listed = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers", ())
        if not isinstance(step, int) or step < 1:
            raise ValueError(
                f"config: decoder_sparse_step: expected a positive integer, got {step}"
            )
        numbers = range(given["num_hidden_layers"])
        dense = tuple(i for i in numbers if i in listed or (i + 1) % step)
        return super().converted(given, config) | {"dense_layers": dense}

    def has_experts(self, number: int) -> bool:
        return self.num_experts > 0 and number not in self.dense_layers

    def experts(self, **options: Any) -> Experts:
        router = {"normalize": self.normalize_experts}
        return super().experts(shared_features=self.shared_features, **router, **options)


class Qwen3NextLanguageModel(Qwen35LanguageModel):
    """Token embedding → blocks with Gated DeltaNet or gated attention → RMSNorm → head.

        >>> model = Qwen3NextLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + experts(norm(x))

    The mixers and norms are those of `Qwen35LanguageModel`. The `Experts` have a shared expert with
    a gate. The blocks of `dense_layers` have a `GatedMLP` with silu instead of experts. The head is
    the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `Qwen3NextLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, the rest as in `GatedDeltaNet`, which is as in transformers.

    Layouts: `hf` (transformers' Qwen3NextForCausalLM) and `hf-file` (the files that it saves, in
    which experts have other keys, and which lack `lm_head.weight` if the head is tied).

    """
