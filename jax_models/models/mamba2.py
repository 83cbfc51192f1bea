"""The Mamba-2 language model (arXiv 2405.21060), of transformers and of the package mamba_ssm."""

__all__ = ["Mamba2LanguageModel", "Mamba2LanguageModelConfig"]

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self, Unpack

from flax import nnx

from jax_models.checks.values import Positive
from jax_models.layers.gated_delta_net import bias_of_log_uniform
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.mamba2 import Mamba2, Mamba2State, checked_limits
from jax_models.layers.norm import RMSNorm
from jax_models.models.architecture import UNDETERMINED, Layout, Size, has, tied_head
from jax_models.models.hf import HFConfig
from jax_models.models.language_model import LanguageModel
from jax_models.ops import carry_dtype
from jax_models.options import LayerOptions, NormOptions, norm_options
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, nested, rms_norm


def _head_features(size: int, fields: Mapping[str, Any]) -> int:
    return size // fields["num_heads"]


def _state_features(channels: int, fields: Mapping[str, Any]) -> int:
    """The convolution has the channels of u, and of B and C for each group."""
    inner = fields["num_heads"] * fields["head_features"]
    return (channels - inner) // (2 * fields["num_groups"])


LAYOUT = Layout(
    "backbone.embeddings.weight",
    "backbone.layers",
    "backbone.norm_f.weight",
    "lm_head.weight",
    blocks_layout="mamba2",
    sizes={
        "num_heads": Size("*.mixer.A_log", 0, rank=1),
        "head_features": Size("*.mixer.out_proj.weight", 1, rank=2, convert=_head_features),
        "num_groups": UNDETERMINED,
        "state_features": Size("*.mixer.conv1d.weight", 0, rank=3, convert=_state_features),
        "kernel_size": Size("*.mixer.conv1d.weight", 2, rank=3),
        "use_bias": has("*.mixer.in_proj.bias"),
        "conv_bias": has("*.mixer.conv1d.bias"),
        "tied_head": tied_head,
    },
)


@dataclasses.dataclass(frozen=True)
class Mamba2LanguageModelConfig(HFConfig):
    """The config of Mamba-2. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Mamba-2"
    model_types: ClassVar = ("mamba2",)
    marks: ClassVar = (".mixer.dt_bias",)
    float32_keys: ClassVar = tuple(f".mixer.{name}" for name in ("A_log", "D", "dt_bias"))
    layouts: ClassVar = {
        "hf": LAYOUT,
        "hf-file": LAYOUT._replace(repeats_embedding=False),
        "mamba_ssm": LAYOUT._replace(embedding="backbone.embedding.weight"),
    }
    hf_class: ClassVar = "Mamba2ForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "head_features",
        "state_size": "state_features",
        "n_groups": "num_groups",
        "conv_kernel": "kernel_size",
        "use_bias": "use_bias",
        "use_conv_bias": "conv_bias",
        "time_step_limit": "dt_limits",
        "time_step_min": "dt_min",
        "time_step_max": "dt_max",
        "time_step_floor": "dt_floor",
        "layer_norm_epsilon": "epsilon",
        "tie_word_embeddings": "tied_head",
        "residual_in_fp32": "residual_in_float32",
        "initializer_range": "initializer_range",
        "rescale_prenorm_residual": "rescale_residual",
    }
    hf_sizes: ClassVar = (
        *("vocab_size", "hidden_size", "num_hidden_layers"),
        *("num_heads", "head_dim", "state_size", "n_groups"),
    )
    hf_values: ClassVar = {"hidden_act": ("silu", "swish")}
    presets: ClassVar = {"mamba2": {}}

    num_heads: int = 6
    """Number of heads of each block."""
    head_features: int = 64
    """Size of a head."""
    state_features: int = 64
    """Size of the state of each feature of a head."""
    num_groups: int = 1
    """Number of groups of heads that share B and C."""
    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    use_bias: bool = False
    """Whether the projections of the blocks have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest Δ."""
    dt_min: Positive = 0.001
    """The least initial Δ."""
    dt_max: Positive = 0.1
    """The greatest initial Δ."""
    dt_floor: Positive = 1e-4
    """A Δ that is drawn below this number starts there."""
    epsilon: Positive = 1e-5
    """ε of the norms."""
    tied_head: bool = False
    """Whether the head shares the embedding's weights."""
    residual_in_float32: bool = True
    """Whether the blocks add their outputs in at least float32."""
    initializer_range: Positive = 0.1
    """The standard deviation of the initial matrices."""
    rescale_residual: bool = False
    """Whether the initial output projections are divided by √num_layers."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "dt_limits", checked_limits("dt_limits", self.dt_limits))

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """Reads the config.json of transformers or of mamba_ssm, which has no `model_type`."""
        if fields is None or "model_type" in fields:
            return super().from_checkpoint(weights, fields, **options)
        return cls.from_state_dict(weights, **_options_of_mamba_ssm(fields) | options)

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
        inner, features = self.num_heads * self.head_features, self.features
        if inner % features:
            raise ValueError(
                f"num_heads: expected num_heads · head_features to be a multiple of features = "
                f"{features}, as in transformers, got {inner}"
            )
        fields = super().to_hf() | {"expand": inner // features}
        del fields["rope_parameters"]
        return fields

    def build(self, **options: Unpack[NormOptions]) -> "Mamba2LanguageModel":
        return Mamba2LanguageModel(self, **options)


def _options_of_mamba_ssm(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of our config that mamba_ssm's config.json determines.

    Raises:
        ValueError: the model has parts that Mamba-2 lacks, such as attention.

    """
    layer = fields.get("ssm_cfg", {})
    unknown = {
        "attn_layer_idx": fields.get("attn_layer_idx"),
        "d_intermediate": fields.get("d_intermediate"),
        "D_has_hdim": layer.get("D_has_hdim"),
        "norm_before_gate": layer.get("norm_before_gate"),
    }
    for name, value in unknown.items():
        if value:
            raise ValueError(f"config.json: {name}: expected none, got {value}")
    if not layer.get("rmsnorm", True) or not fields.get("rms_norm", True):
        raise ValueError("config.json: rms_norm: expected True, got False")
    return {
        "num_groups": layer.get("ngroups", 1),
        "dt_limits": layer.get("dt_limit", Mamba2LanguageModelConfig.dt_limits),
        "residual_in_float32": fields.get("residual_in_fp32", True),
    }


class Mamba2Block(SequenceLayer[Mamba2State]):
    """`x ← x + mixer(norm(x))`, where x keeps its dtype; the state is that of the mixer."""

    divides_time = True

    def __init__(self, config: Mamba2LanguageModelConfig, **options: Unpack[LayerOptions]):
        super().__init__(config.features, **options)
        dt_init = bias_of_log_uniform(config.dt_min, config.dt_max, config.dt_floor)
        in_init = nnx.initializers.normal(config.initializer_range)
        # The residual stream adds up the outputs of all blocks.
        inner, blocks = config.num_heads * config.head_features, config.num_layers
        out_init = torch_uniform(inner * blocks if config.rescale_residual else inner)
        self.norm = RMSNorm(config.features, epsilon=config.epsilon, **norm_options(options))
        inits = {"dt_init": dt_init, "in_init": in_init, "out_init": out_init}
        self.mixer = config.make(Mamba2, **inits, **options)

    def init_state(self, batch_size: int) -> Mamba2State:
        return self.mixer.init_state(batch_size)

    def sequence(self, x, state, rows):
        """Runs the mixer in the dtype of the parameters, and adds its output to x."""
        y = self.norm(x).astype(self.dtype or self.param_dtype)
        y, state = self.mixer.sequence(y, state, rows)
        return x + y.astype(x.dtype), state

    def torch_layouts(self) -> Layouts:
        mixer = self.mixer.torch_layouts()["mamba2"]
        return {"mamba2": [*rms_norm("norm", "norm"), *nested(mixer, "mixer", "mixer")]}


class Mamba2LanguageModel(LanguageModel):
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

    def __init__(self, config: Mamba2LanguageModelConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.initializer_range)
        sizes, matrix = (config.vocab_size, config.features), {"kernel_init": init, **options}
        super().__init__(
            config,
            embedding=nnx.Embed(*sizes, embedding_init=init, **options),
            blocks=[Mamba2Block(config, **options) for _ in range(config.num_layers)],
            norm=RMSNorm(config.features, epsilon=config.epsilon, **options),
            head=None if config.tied_head else Linear(*sizes[::-1], use_bias=False, **matrix),
        )

    def embed(self, tokens, positions):
        """Returns the embeddings, in the dtype in which the blocks add their outputs."""
        x = super().embed(tokens, positions)
        return x.astype(carry_dtype(x.dtype)) if self.config.residual_in_float32 else x

    def unembed(self, x):
        """Computes the logits in the dtype of the embedding."""
        return super().unembed(x.astype(self.embedding.dtype or self.embedding.param_dtype))
