"""What the language models of Mamba, Mamba-2 and Nemotron-H share."""

__all__: list[str] = []  # only the modules of the models import it

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, Unpack

from flax import nnx

from jax_models.checks.values import Positive
from jax_models.layers.gated_delta_net import bias_of_log_uniform
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import RMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.hf import HFConfig
from jax_models.models.language_model import LanguageModel
from jax_models.ops import carry_dtype
from jax_models.options import LayerOptions, NormOptions, norm_options
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, nested, rms_norm


def state_space_layouts(
    blocks_layout: str, mixer_sizes: Callable[[Checkpoint], Fields]
) -> dict[str, Layout]:
    """The layouts of transformers and of mamba_ssm.

    `mixer_sizes` reads the fields that the architectures do not share.
    """

    def sizes(checkpoint: Checkpoint) -> Fields:
        return {
            **mixer_sizes(checkpoint),
            "kernel_size": checkpoint.size("*.mixer.conv1d.weight", 2, rank=3),
            "use_bias": checkpoint.has("*.mixer.in_proj.bias"),
            "conv_bias": checkpoint.has("*.mixer.conv1d.bias"),
            "tied_head": checkpoint.tied_head,
        }

    layout = Layout(
        "backbone.embeddings.weight",
        "backbone.layers",
        "backbone.norm_f.weight",
        "lm_head.weight",
        blocks_layout=blocks_layout,
        sizes=sizes,
    )
    return {
        "hf": layout,
        "hf-file": layout._replace(repeats_embedding=False),
        "mamba_ssm": layout._replace(embedding="backbone.embedding.weight"),
    }


@dataclasses.dataclass(frozen=True)
class StateSpaceConfig(HFConfig):
    """The base class of the configs of models whose blocks have a state space each."""

    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "state_size": "state_features",
        "conv_kernel": "kernel_size",
        "use_bias": "use_bias",
        "use_conv_bias": "conv_bias",
        "time_step_min": "dt_min",
        "time_step_max": "dt_max",
        "time_step_floor": "dt_floor",
        "layer_norm_epsilon": "epsilon",
        "tie_word_embeddings": "tied_head",
        "residual_in_fp32": "residual_in_float32",
        "initializer_range": "initializer_range",
        "rescale_prenorm_residual": "rescale_residual",
    }
    hf_sizes: ClassVar = ("vocab_size", "hidden_size", "num_hidden_layers", "state_size")
    hf_values: ClassVar = {"hidden_act": ("silu", "swish")}

    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    use_bias: bool = False
    """Whether the projections of the blocks have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    dt_min: Positive = 0.001
    """The least initial Δ."""
    dt_max: Positive = 0.1
    """The greatest initial Δ."""
    dt_floor: Positive = 1e-4
    """The lower bound of each initial Δ after it is drawn."""
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

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """Reads the config.json of transformers or of mamba_ssm, which has no `model_type`."""
        if fields is None or "model_type" in fields:
            return super().from_checkpoint(weights, fields, **options)
        return cls.from_state_dict(weights, **cls.options_of_mamba_ssm(fields) | options)

    @classmethod
    def options_of_mamba_ssm(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of our config that mamba_ssm's config.json determines.

        Raises:
            ValueError: the model has parts that ours lack, such as attention.

        """
        layer = fields.get("ssm_cfg") or {}
        unknown = {
            "attn_layer_idx": fields.get("attn_layer_idx"),
            "d_intermediate": fields.get("d_intermediate"),
            "ssm_cfg.D_has_hdim": layer.get("D_has_hdim"),
            "ssm_cfg.norm_before_gate": layer.get("norm_before_gate"),
        }
        for name, value in unknown.items():
            if value:
                raise ValueError(f"config.json: {name}: expected none, got {value}")
        norms = {
            "rms_norm": fields.get("rms_norm", True),
            "ssm_cfg.rmsnorm": layer.get("rmsnorm", True),
        }
        for name, value in norms.items():
            if not value:
                raise ValueError(f"config.json: {name}: expected True, got {value}")
        return {"residual_in_float32": fields.get("residual_in_fp32", True)}

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which never asks to rescale initial weights.

        If it did, transformers 5.24 would also divide the output projections that it loads.
        """
        fields = super().to_hf() | {"rescale_prenorm_residual": False}
        del fields["rope_parameters"]
        return fields

    def make_mixer(self, **options: Any) -> SequenceLayer[Any]:
        """Builds the mixer of a block."""
        raise NotImplementedError  # a subclass defines it

    def mixer_inits(self, inner_features: int) -> dict[str, Any]:
        """The initializers of a mixer with this number of channels."""
        # The residual stream adds up the outputs of all blocks.
        blocks = self.num_layers if self.rescale_residual else 1
        return {
            "dt_init": bias_of_log_uniform(self.dt_min, self.dt_max, self.dt_floor),
            "in_init": nnx.initializers.normal(self.initializer_range),
            "out_init": torch_uniform(inner_features * blocks),
        }


class StateSpaceBlock(SequenceLayer[Any]):
    """`x ← x + mixer(norm(x))`, where x keeps its dtype.

    The state is that of the mixer, or () if the mixer treats each step separately, as an MLP does.
    """

    divides_time = True

    def __init__(
        self, config: Any, build_mixer: Callable[..., Any], **options: Unpack[LayerOptions]
    ):
        super().__init__(config.features, **options)
        self.norm = RMSNorm(config.features, epsilon=config.epsilon, **norm_options(options))
        self.mixer = build_mixer(**options)

    @property
    def has_state(self) -> bool:
        """Whether the mixer has a state."""
        return isinstance(self.mixer, SequenceLayer)

    def init_state(self, batch_size: int) -> Any:
        return self.mixer.init_state(batch_size) if self.has_state else ()

    def start(self, batch_size: int) -> Any:
        return self.mixer.start(batch_size) if self.has_state else ()

    def sequence(self, x, state, rows):
        """Runs the mixer in the dtype of the parameters, and adds its output to x."""
        y = self.norm(x).astype(self.dtype or self.param_dtype)
        y, state = self.mixer.sequence(y, state, rows) if self.has_state else (self.mixer(y), state)
        return x + y.astype(x.dtype), state

    def torch_layouts(self) -> Layouts:
        return {
            name: [*rms_norm("norm", "norm"), *nested(mixer, "mixer", "mixer")]
            for name, mixer in self.mixer.torch_layouts().items()
        }


class StateSpaceLanguageModel(LanguageModel):
    """Token embedding → `StateSpaceBlock`s → RMSNorm → Linear."""

    config: Any

    def __init__(self, config: StateSpaceConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.initializer_range)
        sizes, matrix = (config.vocab_size, config.features), {"kernel_init": init, **options}
        super().__init__(
            config,
            embedding=nnx.Embed(*sizes, embedding_init=init, **options),
            blocks=[
                StateSpaceBlock(config, config.make_mixer, **options)
                for _ in range(config.num_layers)
            ],
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
