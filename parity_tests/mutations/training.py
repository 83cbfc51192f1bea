"""Optimisers that are not quite torch's."""

from functools import partial

from flax import nnx

from parity_tests.mutations.mutation import Mutation, edited, replaced


def training_mutations() -> list[Mutation]:
    """What a trajectory of training may get wrong."""
    training = partial(Mutation, kind="training", check="optimiser follows the same trajectory")
    return [
        *(
            training(name, "RNNScratch tanh", plant=replaced("optax.adamw", changed(**option)))
            for name, option in (
                ("weight decay of 0.0101", {"weight_decay": 0.0101}),
                ("epsilon of 1e-7", {"eps": 1e-7}),
                ("second beta of 0.9991", {"b2": 0.9991}),
                ("Nesterov's momentum", {"nesterov": True}),
            )
        ),
        training("a constant trained", "HyenaBlock, order 1, kernel 4", plant=edited(train_times)),
    ]


def changed(**option):
    """AdamW with another option than it is given."""

    def wrong(adamw):
        return lambda rate, b1, b2, **options: adamw(
            rate, **{"b1": b1, "b2": b2, **options, **option}
        )

    return wrong


def train_times(layer):
    """The times of a filter, which torch does not train."""
    layer.filter.t = nnx.Param(layer.filter.t[...])
