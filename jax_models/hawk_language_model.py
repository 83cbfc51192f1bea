"""The Hawk language model (Griffin, arXiv 2402.19427, section 2)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.hawk import Hawk, HawkState
from jax_models.language_model import LanguageModel, LanguageModelConfig
from jax_models.linear import Linear
from jax_models.norm import RMSNorm
from jax_models.options import CheckedOptions, FloatingDtype
from jax_models.sequence import SequenceLayer
from jax_models.stack import Remat, Stack
from jax_models.torch_weights import Layouts, Table, embedding, linear, nested, rms_norm


class GatedMLP(CheckedOptions, nnx.Module):
    """`y = (gelu(x W_gate) ⊙ x W_up) W_down`, with the exact gelu."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate_proj = Linear(features, mlp_features, **options)
        self.up_proj = Linear(features, mlp_features, **options)
        self.down_proj = Linear(mlp_features, features, **options)

    def __call__(self, x):
        """The equation, over the last axis of x."""
        gate = ops.gelu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))

    def torch_table(self) -> Table:
        """The twin's keys."""
        projections = ("gate_proj", "up_proj", "down_proj")
        return [row for p in projections for row in linear(p, p, bias=False)]


class HawkBlock(SequenceLayer):
    """The residual block of Griffin.

        x ← x + hawk(norm(x))
        x ← x + mlp(norm(x))

    x is (batch, time, features), the state that of `Hawk`.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP; 3 features in the paper.
        kernel_size: of the convolution.
        time_major: x and y are (time, batch, features).
        dtype: of the computation; by default that of x and the parameters.
        param_dtype: of the parameters.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive.

    Layouts: `hawk` (torch_ref.HawkBlock).

    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        kernel_size: int = 4,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.temporal_pre_norm = RMSNorm(features, **options)
        self.hawk = Hawk(features, kernel_size=kernel_size, **options)
        self.channel_pre_norm = RMSNorm(features, **options)
        self.mlp = GatedMLP(features, mlp_features, **options)

    def init_state(self, batch_size: int) -> HawkState:
        """Zeros, in at least float32."""
        return self.hawk.init_state(batch_size)

    def sequence(self, x, state, lengths, reset):
        """The equation."""
        x = x.astype(self.computation_dtype(x))
        y, state = self.hawk.sequence(self.temporal_pre_norm(x), state, lengths, reset)
        x = x + y
        return x + self.mlp(self.channel_pre_norm(x)), state

    def torch_layouts(self) -> Layouts:
        """`hawk`: the twin's keys."""
        norms = ("temporal_pre_norm", "channel_pre_norm")
        return {
            "hawk": [
                *(row for norm in norms for row in rms_norm(norm, norm)),
                *nested(self.hawk.torch_layouts()["hawk"], "hawk", "hawk"),
                *nested(self.mlp.torch_table(), "mlp", "mlp"),
            ]
        }


@dataclasses.dataclass(frozen=True)
class HawkLanguageModelConfig(LanguageModelConfig):
    """The Hawk language model."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    mlp_features: int = 576
    """Width of the gated MLPs; three times `features` in the paper."""
    kernel_size: int = 4
    """Inputs that the causal convolution sees."""
    remat: Remat = "none"
    """What the backward pass computes again: nothing; "dots", all but the results of matrix
    products; "full", all but the blocks' inputs."""
    scan_layers: bool = False
    """Compile one block for all: faster to compile, slower to run on a CPU."""

    def build(self, **kwargs: Any) -> "HawkLanguageModel":
        """`HawkLanguageModel(self, …)`."""
        return HawkLanguageModel(self, **kwargs)


class HawkLanguageModel(LanguageModel):
    """Token embedding → Hawk blocks → RMSNorm → Linear.

    Args:
        config: the sizes.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters.

    Layouts: `hawk` (torch_ref.HawkLanguageModel).

    """

    def __init__(
        self,
        config: HawkLanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.features, **options)
        self.pos_embedding = None
        blocks = (
            HawkBlock(
                config.features, config.mlp_features, kernel_size=config.kernel_size, **options
            )
            for _ in range(config.num_layers)
        )
        self.layers = Stack(blocks, remat=config.remat, scan_layers=config.scan_layers)
        self.norm = RMSNorm(config.features, **options)
        self.head = Linear(config.features, config.vocab_size, use_bias=False, **options)

    def torch_layouts(self) -> Layouts:
        """`hawk`: the twin's keys."""
        return {
            "hawk": [
                *embedding("embedding", "embedding"),
                *nested(self.layers.torch_layouts()["hawk"], "layers", "blocks"),
                *rms_norm("norm", "final_norm"),
                *linear("head", "head", bias=False),
            ]
        }
