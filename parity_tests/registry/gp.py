"""The Annotated Hyena's language model."""

from functools import partial

from jax_models import GPModelConfig
from jax_models.models.gp import Block
from parity_tests.registry.case import Case, paired
from parity_tests.registry.mutation import (
    Mutation,
    epsilon_doubled,
    gelu_by_tanh,
    replaced,
    transposed,
    zeroed,
)


def language_model(block: Block) -> Case:
    """The case of a language model with this kind of block."""
    config = GPModelConfig(
        vocab_size=11, context_length=13, features=6, num_layers=2, block=block, num_heads=2
    )
    return paired(
        f"GPModel of {block}",
        config.build,
        layout="annotated-hyena",
        architecture="gp_model",
        twin_state=False,
        prefix=5,
        mixes_steps=block != "attention",
    )


CASES = [language_model("hyena"), language_model("attention")]


def head_of_positions(self, x):
    """A head that is tied to the embedding of positions instead of tokens."""
    return x @ self.pos_embedding.embedding[: self.config.vocab_size].T


of_hyena = partial(Mutation, case="GPModel of hyena")
of_attention = partial(Mutation, case="GPModel of attention", kind="forward")

MUTATIONS = [
    of_hyena("B forgotten", kind="weights", plant=zeroed("blocks.0.B"), culprit="layers.0"),
    of_hyena(
        "output projection transposed",
        kind="weights",
        plant=transposed("blocks.1.proj_output.kernel"),
        culprit="layers.1.proj_output",
    ),
    of_hyena(
        "head of another matrix",
        kind="forward",
        plant=replaced("jax_models.GPModel.unembed", lambda _: head_of_positions),
    ),
    of_attention("epsilon doubled", plant=epsilon_doubled("blocks.1.ln1"), culprit="layers.1.ln1"),
    of_attention("gelu by tanh", plant=gelu_by_tanh(), culprit="layers.0.mlp.1"),
]
