"""labml's LSTM with layer norm."""

from functools import partial

from jax_models import LayerNormLSTM
from jax_models.ops.gated.layer_norm_lstm import layer_norm
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, replaced, two_swapped

CASES = [
    paired(
        "LayerNormLSTM",
        partial(LayerNormLSTM, 5, 6),
        layout="labml",
        architecture="layer_norm_lstm",
    )
]


def carrying_normalised(layer_norm_cell):
    """Carries the normalized cell state to the next step, although only h should use it."""

    def cell(gates, c, norms):
        state = layer_norm_cell(gates, c, norms)
        return state._replace(c=layer_norm(state.c, norms.cell_scale, norms.cell_bias))

    return cell


MUTATIONS = [
    Mutation("two weights of one shape swapped", "LayerNormLSTM", "weights", two_swapped()),
    Mutation(
        "normalised cell carried",
        "LayerNormLSTM",
        "forward",
        replaced("jax_models.ops.gated.layer_norm_lstm.layer_norm_cell", carrying_normalised),
    ),
]
