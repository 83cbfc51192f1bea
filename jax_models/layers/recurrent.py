"""Stacks of gated recurrences in layers and directions, the common part of RNN, LSTM and GRU."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jax_models.checks.values import checked_size
from jax_models.layers.dropout import dropout_between
from jax_models.layers.linear import torch_uniform
from jax_models.mesh_axes import whole
from jax_models.ops import carry_dtype
from jax_models.ops.gated.definition import State
from jax_models.options import (
    Index,
    Initializer,
    LayerOptions,
    checked_options,
    norm_options,
    refuse_unused,
)
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, gates, same, transposed


class Cell(nnx.Module):
    """The weights of one recurrence: one direction of one layer of a stack.

    By default, all are drawn uniformly from ±1/√hidden_features, as in torch. If only `bias_init`
    is given, the second bias starts at zero, because the gates use the sum of both. The matrices
    are (in, out), and the gates are side by side along the last axis. A weight that the options
    leave out is None.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_gates: int,
        use_bias: bool,
        recurrent_bias: bool = True,
        proj_features: int | None = None,
        proj_bias: bool = False,
        use_peepholes: bool = False,
        recurrent_kernel_init: Initializer | None,
        recurrent_bias_init: Initializer | None,
        **options: Unpack[LayerOptions],
    ):
        kernel_init, bias_init = options.get("kernel_init"), options.get("bias_init")
        rngs, param_dtype = options["rngs"], options.get("param_dtype")
        # An initializer for a parameter that does not exist is a mistake of the caller.
        draws_bias = use_bias or proj_bias or use_peepholes
        refuse_unused("bias_init", bias_init, unless=draws_bias, because="with use_bias=False")
        refuse_unused(
            "recurrent_bias_init",
            recurrent_bias_init,
            unless=use_bias and recurrent_bias,
            because=f"with {'recurrent' if use_bias else 'use'}_bias=False",
        )
        uniform = torch_uniform(hidden_features)

        def param(init: Initializer | None, *shape: int) -> nnx.Param:
            return nnx.Param((init or uniform)(rngs.params(), shape, param_dtype))

        # Keep this order, because another order would change the weights that a seed gives.
        gates = num_gates * hidden_features
        out_features = proj_features or hidden_features
        self.kernel_ih = param(kernel_init, in_features, gates)
        self.kernel_hh = param(recurrent_kernel_init, out_features, gates)
        self.bias_ih = param(bias_init, gates) if use_bias else None
        second_init = recurrent_bias_init or bias_init
        self.bias_hh = param(second_init, gates) if use_bias and recurrent_bias else None
        if self.bias_hh is not None and bias_init and not recurrent_bias_init:
            self.bias_hh[...] = jnp.zeros_like(self.bias_hh[...])  # keeps the metadata of bias_init
        self.kernel_hr = (
            param(kernel_init, hidden_features, proj_features) if proj_features else None
        )
        self.bias_hr = param(bias_init, proj_features) if proj_features and proj_bias else None
        self.peephole = param(bias_init, 3 * hidden_features) if use_peepholes else None

    # A mesh that divides any of these matrices makes its devices exchange gates and states in every
    # step of the loop over time, even if it divides only the products with the inputs.
    mesh_axes = whole("kernel_ih", "kernel_hh")

    def arrays(self) -> dict[str, Array]:
        """The existing weights by name."""
        names = "kernel_ih", "kernel_hh", "bias_ih", "bias_hh", "kernel_hr", "bias_hr", "peephole"
        weights = {name: getattr(self, name) for name in names}
        return {name: w.get_value() for name, w in weights.items() if w is not None}


class RecurrentStack(SequenceLayer[State]):
    """Layers of one gated recurrence, which run forward, or in both directions with joined outputs.

    The state's arrays are (num_layers · directions, batch, features), ordered as in torch: layer 0
    forward, layer 0 backward, layer 1 forward, … Subclasses set `state_type` and `gate_names` and
    define `operator`.
    """

    state_type: ClassVar[type]
    gate_names: ClassVar[str]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int,
        bidirectional: bool,
        dropout_rate: float,
        time_major: bool,
        proj_features: int | None = None,
        **options: Any,
    ):
        """Builds the cells. All other options are passed to each `Cell`."""
        super().__init__(in_features, **norm_options(options))
        self.time_major = time_major
        self.hidden_features = checked_size("hidden_features", hidden_features)
        self.proj_features = proj_features
        self.out_features = proj_features or hidden_features
        self.num_layers = checked_size("num_layers", num_layers)
        self.num_directions: Literal[1, 2] = 2 if bidirectional else 1
        # A layer that runs in both directions sees the future, so it cannot run step by step.
        self.causal = not bidirectional
        self.dropout = dropout_between(num_layers, dropout_rate, rngs=options["rngs"])
        self.cells = nnx.List(
            Cell(
                in_features if layer == 0 else self.num_directions * self.out_features,
                hidden_features,
                num_gates=len(self.gate_names),
                proj_features=proj_features,
                **options,
            )
            for layer in range(num_layers)
            for _ in range(self.num_directions)
        )

    def operator(self) -> Callable[..., tuple[Array, State]]:
        """Returns the function that runs several layers.

        It is `ops.recurrent_stack` with a recurrence. A subclass defines it.
        """
        raise NotImplementedError  # a subclass defines it

    def init_state(self, batch_size: int) -> State:
        """Zeros, (num_layers · directions, batch, features), in at least float32."""
        sizes = {"h": self.out_features, "c": self.hidden_features}
        return self.state_type(
            *(
                jnp.zeros((len(self.cells), batch_size, sizes[field]), self.state_dtype)
                for field in self.state_type._fields
            )
        )

    def sequence(self, x, state, rows):
        """Runs all layers in one call of the operator, or with dropout, in one call per layer."""
        dtype = self.computation_dtype(x)
        state = jax.tree.map(lambda s: s.astype(carry_dtype(dtype)), state)
        x, run = x.astype(dtype), self.operator()
        cells = [{k: w.astype(dtype) for k, w in cell.arrays().items()} for cell in self.cells]
        # Dropout reads the outputs of each layer, so it needs a call for each. Otherwise, one call
        # runs all layers.
        drops = self.dropout.rate > 0 and not self.dropout.deterministic
        count = self.num_directions if drops else len(cells)
        last_states = []
        for start in range(0, len(cells), count):
            if start:
                x = self.dropout(x)
            chunk = slice(start, start + count)
            x, last_state = run(
                x,
                jax.tree.map(lambda s: s[chunk], state),  # noqa: B023
                cells[chunk],
                rows=rows,
                num_directions=self.num_directions,
            )
            last_states.append(last_state)
        return x, jax.tree.map(lambda *s: jnp.concatenate(s), *last_states)

    def torch_layouts(self) -> Layouts:
        """`torch.nn`: torch.nn.RNN, LSTM or GRU. `torch.nn.cell`: torch.nn.RNNCell, LSTMCell or
        GRUCell. `scratch`: torch_ref's, with a Linear per gate.
        """
        names = self.cells[0].arrays().keys() - {"peephole"}
        biases = {name for name in names if name.startswith("bias")}
        layouts = {}
        if biases in (set(), {"bias_ih", "bias_hh"}) and self.cells[0].peephole is None:
            layouts["torch.nn"] = self._torch_nn_table()
        if len(self.cells) == 1 and not self.options_beyond_a_cell():
            layouts["torch.nn.cell"] = self.cell_table(0)
        if self.causal and self.num_layers == 1 and 2 * len(biases) in (0, len(names)):
            layouts["scratch"] = self.scratch_table(0)
        return layouts

    def options_beyond_a_cell(self) -> list[str]:
        """The options with which none of the layer's cells is a cell of torch.nn."""
        cell = self.cells[0]
        options = {
            f"proj_features={self.proj_features}": self.proj_features is not None,
            "recurrent_bias=False": cell.bias_ih is not None and cell.bias_hh is None,
            "use_peepholes=True": cell.peephole is not None,
        }
        return [option for option, is_set in options.items() if is_set]

    def foreign_format(self, keys: Iterable[object]) -> str | None:
        """Describes the keys of a cell of torch.nn, if the layer is not a single such cell."""
        names = {str(key).rpartition(".")[2] for key in keys}
        kernels, biases = {"weight_ih", "weight_hh"}, {"bias_ih", "bias_hh"}
        more = self._more_than_a_cell()
        if not more or not kernels <= names <= kernels | biases:
            return None
        return f"a cell of torch.nn (it has weight_ih), but {more}"

    def missing_layout(self, layout: str) -> str | None:
        """Says why the layer lacks `torch.nn.cell`, if it is not a single cell of torch.nn."""
        more = self._more_than_a_cell() if layout == "torch.nn.cell" else None
        return more and f"{layout!r} is a single cell of torch.nn, but {more}"

    def _more_than_a_cell(self) -> str | None:
        """Says why the layer is not a cell of torch.nn, and what to do. None: it is a cell."""
        of_several = {
            f"num_layers={self.num_layers}": self.num_layers > 1,
            "bidirectional=True": not self.causal,
        }
        options = [option for option, is_set in of_several.items() if is_set]
        options += self.options_beyond_a_cell()
        if not options:
            return None
        those = "this option" if len(options) == 1 else "these options"
        tables_hint = (
            ", or give a table of its cells, [*nested(layer.cell_table(0), PATH, KEY), …], which "
            "parity_tests.draft_table drafts"
            if self.cell_tables()
            else ""
        )
        return (
            f"this {type(self).__name__} has {', '.join(options)}: a cell fits a layer without "
            f"{those}{tables_hint}"
        )

    def _torch_nn_table(self) -> Table:
        table = []
        for index in range(len(self.cells)):
            layer, backward = divmod(index, self.num_directions)
            suffix = f"_l{layer}_reverse" if backward else f"_l{layer}"
            for row in self.cell_table(index):
                table.append(row._replace(keys=tuple(f"{key}{suffix}" for key in row.keys)))
        return table

    @checked_options
    def cell_table(self, index: Index) -> Table:
        """The table of one cell with the keys of torch.nn's cells: `weight_ih`, `bias_ih`, …

        Cells are ordered as in the state. A loop over several cells of torch.nn, such as one for
        each direction, is loaded by a table of several cells:

            [*nested(lstm.cell_table(0), "", "forward_cell"),
             *nested(lstm.cell_table(1), "", "backward_cell")]

        Raises:
            ValueError: `index` is not that of a cell, or the cells have peepholes, which the cells
                of torch.nn do not have.

        """
        if index >= len(self.cells):
            raise ValueError(f"index: expected less than the {len(self.cells)} cells, got {index}")
        if self.cells[index].peephole is not None:
            raise ValueError(
                "cell_table: no cell of torch.nn has peepholes, but this layer has "
                "use_peepholes=True: give a table with rows for its parameters as `layout`"
            )
        table = []
        for name in self.cells[index].arrays():
            kind, which = name.split("_")
            row, key = (transposed, "weight") if kind == "kernel" else (same, "bias")
            table.append(row(f"cells.{index}.{name}", f"{key}_{which}"))
        return table

    def cell_tables(self) -> list[Table]:
        """The tables of the cells of a layer with several, or none if torch.nn has no such cells.

        `draft_table` of `parity_tests` uses them for a module that loops over cells of torch.nn.
        """
        if len(self.cells) == 1 or self.options_beyond_a_cell():
            return []
        return [self.cell_table(index) for index in range(len(self.cells))]

    def scratch_table(self, index: int) -> Table:
        """The table of one cell with a Linear per gate: `w_ii`, `w_hi`, `w_if`, … and `w_hr`."""
        table = []
        for name in self.cells[index].arrays():
            if name == "peephole":
                table.append(same(f"cells.{index}.{name}", name))
                continue
            kind, which = name.split("_")
            key = "weight" if kind == "kernel" else "bias"
            ends = "r" if which == "hr" else self.gate_names
            keys = [f"w_{which[0]}{end}.{key}" for end in ends]
            table.append(gates(f"cells.{index}.{name}", keys))
        return table
