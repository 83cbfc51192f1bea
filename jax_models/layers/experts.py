"""The mixture of experts."""

__all__ = ["Experts"]

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.activation import ACTIVATIONS, MLPActivation
from jax_models.layers.dropout import TrainingView
from jax_models.layers.linear import Linear, lecun_normal
from jax_models.layers.load_balancing import ExpertLoad, load_of_tokens
from jax_models.layers.mlp import MLP, GatedMLP
from jax_models.layers.norm import checked_rows
from jax_models.mesh_axes import first_axis, whole
from jax_models.ops.affine import product
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.options import CheckedOptions, MatrixOptions, refuse_unused, with_inits
from jax_models.weights import Layouts, SharedLayer, Table, Weight, linear, nested, same, transposed
from jax_models.weights.constant import Constant
from jax_models.weights.rows import namespace

SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
"""The functions that turn a router's logits into scores."""
lecun_normal_of_each = nnx.initializers.lecun_normal(batch_axis=0)
"""`lecun_normal` for each matrix of a stack."""


class Experts(SharedLayer, CheckedOptions, TrainingView):
    """A mixture of experts: a router chooses some of many MLPs for each token.

        >>> experts = Experts(64, 32, num_experts=8, experts_per_token=2, rngs=nnx.Rngs(0))
        >>> y = experts(jnp.ones((8, 100, 64)))

        s = softmax(x W_router)
        w_e = scale · s_e / (Σ s + ε)        over the chosen experts, those with the largest s
        y = Σ_e w_e (silu(x W_gate,e) ⊙ x W_up,e) W_down,e

    x and y are (…, features). Experts have no capacity limits, so the result of a token does not
    depend on other tokens. Because of the normalization, w is the softmax of the chosen experts'
    logits.

    With `scores="sigmoid"`, s = σ(x W_router). With `use_expert_bias`, the chosen experts are those
    with the largest s + expert_bias. The bias does not enter w. It is a `Constant`, because it is
    balanced by other means than gradients. If the experts are in groups, a group is rated by the
    sum of its two largest s + expert_bias, and the experts are chosen from the best
    `groups_per_token` groups.

    The shared expert is an MLP that all tokens go through. Its output is added to y:

        y ← y + shared(x)    or, with shared_gate,    y ← y + σ(x w_shared) shared(x)

    With `latent_features`, the chosen experts read x W_in, and their weighted sum is multiplied by
    W_out. The router and the shared expert still read x.

    On a mesh that divides the matrices by expert, call `nnx.view(experts, experts_axis="model")`
    under `jax.set_mesh`. Otherwise, XLA gathers the matrices of all experts on each device.

    With `track_load`, a call in training stores in the variable `load` what `load_balancing_loss`
    needs. Like dropout, it does not do so in `nnx.view(model, deterministic=True)` or after
    `model.eval()`. Inside a `jax.shard_map`, call `nnx.view(model, batch_axis="data",
    time_axis="sequence")` to name the mesh axes over which tokens are divided.

    Args:
        features: size of x and y.
        expert_features: width of each expert.
        num_experts: number of experts.
        experts_per_token: number of experts that are chosen for each token.
        scores: the function that turns the router's logits into s.
        normalize: whether w is divided by the sum over the chosen experts.
        epsilon: ε of this division.
        scale: the factor of w.
        use_expert_bias: whether there is an expert_bias.
        num_groups: number of groups of consecutive experts, a divisor of `num_experts`.
        groups_per_token: number of groups from which the experts of a token are chosen.
        activation: silu, another activation of `GatedMLP`, or the square of the relu.
        gated: whether experts have a gate. Without it, they are an `MLP`.
        shared_features: width of the shared expert. None: there is none.
        shared_gate: whether the shared expert's output is multiplied by a gate.
        latent_features: size of the input and the output of each chosen expert. None: `features`,
            without W_in and W_out.
        use_bias: whether W_in, W_out and the shared expert have biases.
        track_load: whether calls in training store how much they use each expert.
        **options: as in `MatrixOptions`. Matrices are initialized by `lecun_normal`, the bias to
            zero. `kernel_init` receives the shapes (num_experts, in, out) of all experts' matrices
            together. The router is computed in at least float32.

    Raises:
        ValueError: a size is not positive, more experts or groups are to be chosen than there are,
            num_groups does not divide num_experts or leaves groups of a single expert,
            shared_gate or use_bias concerns nothing that is there, or track_load is given with
            scores that do not add up to one.

    Layouts: those that the architectures declare, and `experts` (torch_ref.Experts).

    Source: Shazeer et al. 2017 (arXiv 1701.06538); DeepSeek-V3 (2412.19437) for bias and groups.

    """

    def __init__(
        self,
        features: int,
        expert_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        epsilon: Positive = 1e-20,
        scale: Positive = 1.0,
        use_expert_bias: bool = False,
        num_groups: int = 1,
        groups_per_token: int = 1,
        activation: MLPActivation = "silu",
        gated: bool = True,
        shared_features: int | None = None,
        shared_gate: bool = False,
        latent_features: int | None = None,
        use_bias: bool = False,
        track_load: bool = False,
        **options: Unpack[MatrixOptions],
    ):
        # Groups must be able to provide the experts.
        check_divides("num_groups", num_groups, "num_experts", num_experts)
        _check_at_most("groups_per_token", groups_per_token, "num_groups", num_groups)
        group_size = num_experts // num_groups
        if num_groups > 1 and group_size < 2:
            raise ValueError(f"num_groups: expected groups of at least 2 experts, got {num_groups}")
        available = groups_per_token * group_size
        _check_at_most("experts_per_token", experts_per_token, "experts to choose from", available)
        refuse_unused(
            "shared_gate",
            shared_gate,
            unless=shared_features is not None,
            because="without shared_features",
        )
        refuse_unused(
            "use_bias",
            use_bias,
            unless=shared_features is not None or latent_features is not None,
            because="without shared_features and latent_features",
        )
        refuse_unused(
            "track_load",
            track_load,
            unless=scores == "softmax",
            because=f'with scores="{scores}"',
        )
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.scores, self.normalize, self.epsilon, self.scale = scores, normalize, epsilon, scale
        self.num_groups, self.groups_per_token = num_groups, groups_per_token
        self.activation: MLPActivation = activation
        self.dtype = options.get("dtype")
        self.experts_axis: str | None = None
        # The router and its bias.
        rngs, param_dtype = options["rngs"], options.get("param_dtype")
        init = options.get("kernel_init") or lecun_normal
        self.router_kernel = nnx.Param(init(rngs.params(), (features, num_experts), param_dtype))
        bias = jnp.zeros(num_experts, param_dtype)
        self.expert_bias = Constant(bias) if use_expert_bias else None
        # What the router did in the last call, for `load_balancing_loss`.
        load = jnp.zeros((2, num_experts), ops.carry_dtype(self.router_kernel.dtype))
        self.load = ExpertLoad(load) if track_load else None
        self.deterministic = False
        # The matrices of all experts.
        init = options.get("kernel_init") or lecun_normal_of_each
        inner = num_experts, latent_features or features, expert_features
        outer = num_experts, expert_features, latent_features or features
        self.gate_kernel = nnx.Param(init(rngs.params(), inner, param_dtype)) if gated else None
        self.up_kernel = nnx.Param(init(rngs.params(), inner, param_dtype))
        self.down_kernel = nnx.Param(init(rngs.params(), outer, param_dtype))
        # The shared expert, which is of the same kind.
        mlp: Any = GatedMLP if gated else MLP
        has_shared = shared_features is not None
        self.shared = (
            mlp(features, shared_features, use_bias=use_bias, activation=activation, **options)
            if has_shared
            else None
        )
        # The projections to and from the latent features.
        matrix = with_inits(options, lecun_normal, use_bias=use_bias)
        latent = latent_features
        self.latent_in = None if latent is None else Linear(features, latent, **matrix)
        self.latent_out = None if latent is None else Linear(latent, features, **matrix)
        matrix = with_inits(options, lecun_normal, None, use_bias=False)
        self.shared_gate = Linear(features, 1, **matrix) if shared_gate else None

    def set_view(
        self,
        deterministic: bool | None = None,
        batch_axis: str | None = None,
        time_axis: str | None = None,
        experts_axis: str | None = None,
    ) -> None:
        """Sets these options in a view, as in `TrainingView.set_view`.

        Args:
            deterministic: if true, calls store no `load`.
            batch_axis: the mesh axis over which rows are divided.
            time_axis: the mesh axis over which time is divided.
            experts_axis: the mesh axis over which the experts are divided. Each device runs its own
                experts, and the results of all devices are added up. It must divide `num_experts`.

        """
        super().set_view(deterministic, batch_axis, time_axis)
        self.experts_axis = experts_axis or self.experts_axis

    def __call__(
        self, x: Float[Array, "... features"], *, active: Bool[Array, "..."] | None = None
    ) -> Float[Array, "... features"]:
        """Applies the chosen experts, and the shared one, to the last axis of x.

        `active` is False for padding, which `load` does not count. None: all tokens count.

        Raises:
            TypeError: x does not consist of floating numbers.
            ValueError: the last axis of x has another size than `features`, `active` has another
                shape than the tokens, or `experts_axis` is no axis of the mesh or does not divide
                the experts.

        """
        x = checked_rows(x, self.router_kernel.shape[0])
        if active is not None and jnp.shape(active) != x.shape[:-1]:
            raise ValueError(f"active: expected shape {x.shape[:-1]}, got {jnp.shape(active)}")
        dtype = self.dtype or jnp.result_type(x, self.up_kernel[...])
        x = x.astype(dtype)
        tokens = x.reshape(-1, x.shape[-1])
        inputs = tokens if self.latent_in is None else self.latent_in(tokens)
        y = self.mixture(inputs, *self.route(tokens, active))
        y = y if self.latent_out is None else self.latent_out(y.astype(dtype))
        y = y.reshape(x.shape)
        if self.shared is not None:
            y = y + self.shared_output(x).astype(y.dtype)
        return y.astype(dtype)

    def shared_output(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Returns the output of the shared expert, times its gate if it has one."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * y

    def route(
        self, x: Float[Array, "tokens features"], active: Bool[Array, "..."] | None = None
    ) -> tuple[Float[Array, "tokens chosen"], Int[Array, "tokens chosen"]]:
        """Returns the weights and the numbers of the experts that are chosen for each token.

        The product has full precision, because a TPU would otherwise round x to bfloat16, and then
        choose other experts.
        """
        wide = ops.carry_dtype(x.dtype)
        logits = product(x.astype(wide), self.router_kernel[...].astype(wide))
        scores = SCORES[self.scores](logits)
        chosen = self.choose(scores)
        if self.load is not None and not self.deterministic:
            self.load.set_value(load_of_tokens(scores, chosen, active))
        return self.weigh(scores, chosen), chosen

    def choose(self, scores: Float[Array, "tokens experts"]) -> Int[Array, "tokens chosen"]:
        """Returns the numbers of the experts with the largest scores after the bias is added."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias[...].astype(scores.dtype)[None]
        if self.num_groups > 1:
            size = self.num_experts // self.num_groups
            groups = scores.reshape(scores.shape[0], self.num_groups, size)
            ratings = lax.top_k(groups, 2)[0].sum(axis=-1)
            _, best = lax.top_k(ratings, self.groups_per_token)
            stays = jax.nn.one_hot(best, self.num_groups, dtype=bool).any(axis=1)
            scores = jnp.where(stays[..., None], groups, -jnp.inf).reshape(scores.shape)
        return lax.top_k(scores, self.experts_per_token)[1]

    def weigh(
        self, scores: Float[Array, "tokens experts"], chosen: Int[Array, "tokens chosen"]
    ) -> Float[Array, "tokens chosen"]:
        """Returns the weights of the chosen experts."""
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + self.epsilon)
        return self.scale * weights

    def mixture(
        self,
        x: Float[Array, "tokens features"],
        weights: Float[Array, "tokens chosen"],
        chosen: Int[Array, "tokens chosen"],
    ) -> Float[Array, "tokens features"]:
        """Returns the weighted sums of the outputs of the chosen experts, in at least float32."""
        gate = None if self.gate_kernel is None else self.gate_kernel[...]
        kernels = Kernels(gate, self.up_kernel[...], self.down_kernel[...])
        axis = self.experts_axis
        if axis is None:
            return self.local_mixture(kernels, x, weights, chosen)
        sizes = jax.sharding.get_abstract_mesh().shape
        if axis not in sizes:
            raise ValueError(
                f"experts_axis: expected an axis of the mesh, which has {[*sizes]}, got {axis!r}"
            )
        check_divides("experts_axis", sizes[axis], "num_experts", self.num_experts)

        # The experts of other devices get the number `count`, which sorts last and has no matrix.
        def of_device(kernels: Kernels, x: Array, weights: Array, chosen: Array):
            count = len(kernels.up)
            own = chosen - count * lax.axis_index(axis)
            own = jnp.where((own >= 0) & (own < count), own, count)
            x, weights, own = match_varying_axes((x, weights, own))
            return lax.psum(self.local_mixture(kernels, x, weights, own), axis)

        specs = jax.tree.map(lambda _: P(axis), kernels), P(), P(), P()
        divided = jax.shard_map(of_device, in_specs=specs, out_specs=P(), axis_names={axis})
        return divided(kernels, x, weights, chosen)

    def local_mixture(
        self,
        kernels: "Kernels",
        x: Float[Array, "tokens features"],
        weights: Float[Array, "tokens chosen"],
        chosen: Int[Array, "tokens chosen"],
    ) -> Float[Array, "tokens features"]:
        """Like `mixture`, with these matrices. A number without a matrix contributes zero."""
        # Sort the pairs of a token and an expert by expert, and run all experts at once.
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert)
        sorting = Sorting(order, jnp.argsort(order))
        sizes = jnp.bincount(expert, length=len(kernels.up))
        count = self.experts_per_token
        y = self.run_experts(kernels, linear_map(to_experts, to_tokens, sorting, x, count), sizes)
        # Weigh the outputs, and add up those of each token.
        y = y.astype(weights.dtype) * weights.reshape(-1)[order][:, None]
        return linear_map(to_tokens, to_experts, sorting, y, count)

    def run_experts(
        self, kernels: "Kernels", x: Float[Array, "pairs features"], sizes: Int[Array, " experts"]
    ) -> Float[Array, "pairs features"]:
        """Runs the experts, each on its rows of x: the first `sizes[0]`, the next `sizes[1]`, ….

        `(silu(x W_gate) ⊙ x W_up) W_down`, or without a gate `silu(x W_up) W_down`.
        """
        activation = ACTIVATIONS[self.activation]
        gate_kernel, up_kernel, down_kernel = jax.tree.map(lambda w: w.astype(x.dtype), kernels)
        up = ops.grouped_dot(x, up_kernel, sizes)
        if gate_kernel is None:
            hidden = activation(up)
        else:
            hidden = activation(ops.grouped_dot(x, gate_kernel, sizes)) * up
        return ops.grouped_dot(hidden, down_kernel, sizes)

    mesh_axes = first_axis("experts", "gate_kernel", "up_kernel", "down_kernel") | whole(
        "router_kernel", "shared_gate", "latent_in", "latent_out"
    )

    def rows(
        self, router: str, gate: str | None, up: str, down: str, expert_bias: str | None = None
    ) -> Table:
        """The rows of a torch module that has the router and the experts under these keys.

        A key of an expert's matrix contains `{}` for the number of the expert, as in
        `experts.{}.w1.weight`. If it does not, the matrices of all experts are stacked, (experts,
        out, in). If `gate` equals `up`, one matrix holds both, the gate first. The rows of the
        shared expert are those of `shared` and `shared_gate`.
        """
        biases = [] if expert_bias is None else [same("expert_bias", expert_bias)]
        inputs = {"gate_kernel": gate, "up_kernel": up}
        if gate in (None, up):
            names = ["up_kernel"] if gate is None else [*inputs]
            matrices = [self._row_of_matrices(names, up)]
        else:
            matrices = [self._row_of_matrices([name], key) for name, key in inputs.items()]
        matrices.append(self._row_of_matrices(["down_kernel"], down))
        return [transposed("router_kernel", router), *biases, *matrices]

    def _row_of_matrices(self, params: Sequence[str], key: str) -> Weight:
        """The (out, in) matrices of a key contain those of the parameters, one below the other."""
        is_of_one = "{}" in key
        keys = [key.format(i) for i in range(self.num_experts)] if is_of_one else [key]

        def to_jax(*matrices):
            stack = namespace(matrices[0]).stack(matrices) if is_of_one else matrices[0]
            parts = namespace(stack).split(stack, len(params), axis=1)
            return tuple(part.swapaxes(1, 2) for part in parts)

        def to_torch(*kernels):
            stack = [kernel.swapaxes(1, 2) for kernel in kernels]
            stack = namespace(kernels[0]).concat(stack, axis=1)
            return tuple(stack) if is_of_one else (stack,)

        return Weight(tuple(params), tuple(keys), to_jax, to_torch, stacks=True)

    def torch_layouts(self) -> Layouts:
        """`experts`: the keys of torch_ref.Experts; and those that the architectures declare."""
        gate, up, down = (f"experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        bias = None if self.expert_bias is None else "expert_bias"
        if self.gate_kernel is None:
            gate = None
        table = self.rows("router.weight", gate, up, down, bias)
        if isinstance(self.shared, GatedMLP):
            table += nested(self.shared.rows("gate_proj", "up_proj", "down_proj"), *2 * ["shared"])
        elif self.shared is not None:
            table += nested(self.shared.rows("up_proj", "down_proj"), *2 * ["shared"])
        if self.shared_gate is not None:
            table += linear("shared_gate", "shared_gate", bias=False)
        if self.latent_in is not None:
            bias = self.latent_in.use_bias
            table += linear("latent_in", "latent_in", bias=bias)
            table += linear("latent_out", "latent_out", bias=bias)
        return super().torch_layouts() | {"experts": table}


class Kernels(NamedTuple):
    """The matrices of the experts, or of those of one device."""

    gate: Float[Array, "experts features hidden"] | None
    up: Float[Array, "experts features hidden"]
    down: Float[Array, "experts hidden features"]


class Sorting(NamedTuple):
    """The order of the pairs of a token and an expert that are sorted by expert."""

    order: Int[Array, " pairs"]
    """The numbers of the pairs in this order. Without it, the pairs are sorted by token."""
    inverse: Int[Array, " pairs"]
    """Where each pair is in this order."""


def to_experts(
    count: int, sorting: Sorting, x: Float[Array, "tokens features"]
) -> Float[Array, "pairs features"]:
    """Copies each token to its `count` pairs. Its transpose is `to_tokens`."""
    return x[sorting.order // count]


def to_tokens(
    count: int, sorting: Sorting, y: Float[Array, "pairs features"]
) -> Float[Array, "tokens features"]:
    """Adds up the `count` pairs of each token. Unlike JAX's transpose of a copy, it is fast."""
    return y[sorting.inverse].reshape(-1, count, y.shape[-1]).sum(axis=1)


def _check_at_most(name: str, count: int, whole: str, size: int) -> None:
    if count > size:
        raise ValueError(f"{name}: expected at most {whole} = {size}, got {count}")
