"""The MLPs, with and without a gate."""

__all__ = ["MLP", "GatedMLP"]

from typing import Any, Unpack

from flax import nnx

from jax_models.layers.activation import ACTIVATIONS, GateActivation, MLPActivation
from jax_models.layers.linear import Adapter, Linear, adapted, lecun_normal
from jax_models.layers.norm import checked_rows
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.options import CheckedOptions, Initializer, LayerOptions, refuse_unused, with_inits
from jax_models.weights import SharedLayer, Table, linear, parts


class GatedMLP(SharedLayer, CheckedOptions, nnx.Module):
    """The gated MLP of Griffin.

        >>> mlp = GatedMLP(64, 192, rngs=nnx.Rngs(0))
        >>> y = mlp(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate) ⊙ x W_up) W_down

    x and y are (…, features). By default, gelu is the exact GELU, with erf. `activation` replaces
    it with its approximation by tanh, or with silu.

    Args:
        features: size of x and y.
        mlp_features: width of the MLP.
        use_bias: whether the three projections have biases.
        activation: the exact gelu, its approximation, or silu.
        gate_init: initializes W_gate. None: like `kernel_init`.
        down_init: initializes W_down. None: like `kernel_init`.
        **options: as in `LayerOptions`. The matrices are initialized by `lecun_normal`, the biases
            to zero.

    Raises:
        ValueError: a size is not positive, or `bias_init` is given without biases.

    Layouts: those that the architectures declare. `torch_layouts` lists them.

    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        use_bias: bool = False,
        activation: GateActivation = "gelu",
        gate_init: Initializer | None = None,
        down_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        matrix = _options_of_projections(use_bias, options)
        self.activation: GateActivation = activation
        self.use_bias = use_bias
        gate = {**matrix, "kernel_init": gate_init or matrix["kernel_init"]}
        self.gate_proj = Linear(features, mlp_features, **gate)
        self.up_proj = Linear(features, mlp_features, **matrix)
        matrix["kernel_init"] = down_init or matrix["kernel_init"]
        self.down_proj = Linear(mlp_features, features, **matrix)

    def __call__(self, x, adapter: Adapter | None = None):
        """Applies the MLP to the last axis of x.

        `adapter` is a function of x that returns what is added to x W_gate and to x W_up.
        """
        x = checked_rows(x, self.gate_proj.in_features)
        gate, up = adapted([self.gate_proj(x), self.up_proj(x)], x, adapter)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)

    mesh_axes = last_axis("hidden", "gate_proj", "up_proj") | first_axis(
        "hidden", "down_proj.kernel"
    )

    def rows(self, gate: str, up: str, down: str) -> Table:
        """The rows of a torch module that keeps its projections in `Linear`s of these names.

        If `gate` equals `up`, a single `Linear` computes both projections, that of the gate first.
        """
        bias = self.use_bias
        if gate == up:
            names = {"kernel": "weight", "bias": "bias"} if bias else {"kernel": "weight"}
            inputs = [
                parts([f"gate_proj.{ours}", f"up_proj.{ours}"], f"{gate}.{name}")
                for ours, name in names.items()
            ]
        else:
            inputs = linear("gate_proj", gate, bias=bias) + linear("up_proj", up, bias=bias)
        return [*inputs, *linear("down_proj", down, bias=bias)]


class MLP(SharedLayer, CheckedOptions, nnx.Module):
    """The MLP of Nemotron-H, which has no gate.

        >>> mlp = MLP(64, 192, rngs=nnx.Rngs(0))
        >>> y = mlp(jnp.ones((8, 100, 64)))

        y = relu(x W_up)² W_down

    x and y are (…, features). `activation` replaces the square of the relu.

    Args:
        features: size of x and y.
        mlp_features: width of the MLP.
        use_bias: whether the two projections have biases.
        activation: the square of the relu, or an activation of `GatedMLP`.
        **options: as in `LayerOptions`. The matrices are initialized by `lecun_normal`, the biases
            to zero.

    Raises:
        ValueError: a size is not positive, or `bias_init` is given without biases.

    Layouts: those that the architectures declare. `torch_layouts` lists them.

    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        use_bias: bool = False,
        activation: MLPActivation = "relu2",
        **options: Unpack[LayerOptions],
    ):
        matrix = _options_of_projections(use_bias, options)
        self.activation: MLPActivation = activation
        self.use_bias = use_bias
        self.up_proj = Linear(features, mlp_features, **matrix)
        self.down_proj = Linear(mlp_features, features, **matrix)

    def __call__(self, x):
        """Applies the MLP to the last axis of x."""
        x = checked_rows(x, self.up_proj.in_features)
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))

    mesh_axes = last_axis("hidden", "up_proj") | first_axis("hidden", "down_proj.kernel")

    def rows(self, up: str, down: str) -> Table:
        """The rows of a torch module that keeps its projections in `Linear`s of these names."""
        projections = (("up_proj", up), ("down_proj", down))
        return [row for ours, key in projections for row in linear(ours, key, bias=self.use_bias)]


def _options_of_projections(use_bias: bool, options: LayerOptions) -> dict[str, Any]:
    bias_init = options.get("bias_init")
    refuse_unused("bias_init", bias_init, unless=use_bias, because="with use_bias=False")
    return with_inits(options, lecun_normal, use_bias=use_bias)
