"""The language model of Ling 3."""

from functools import partial

from jax_models import LingLanguageModelConfig
from parity_tests.registry.case import paired
from parity_tests.registry.kimi_linear import CASES as KIMI
from parity_tests.registry.latent_attention import by_halves
from parity_tests.registry.mutation import Mutation, edited, replaced, with_value

CASE = "LingLanguageModel"
# A mesh divides the output gates by head, so that their number must be even.
OPTIONS = {"num_heads": 4, "rope_theta": 10.0, "min_log_decay": -2.0}
CASES = [
    paired(
        CASE,
        LingLanguageModelConfig(**vars(KIMI[0].config) | OPTIONS).build,
        layout="hf",
        architecture="ling",
        twin_state=False,
        prefix=5,
    )
]


def without_gates(model):
    """Leaves out the output gates of the latent attention."""
    model.blocks[1].mixer.g_proj.scale = 0.0


forward = partial(Mutation, case=CASE, kind="forward")
delta, latent = (f"model.layers.{i}.self_attn" for i in range(2))
MUTATIONS = [
    forward(
        "decays without a bound",
        plant=with_value("blocks.0.mixer", "min_log_decay", None),
        culprit=f"{delta}.forget_gate",
    ),
    forward("halves rotated", plant=replaced("jax_models.ops.rotary", by_halves), culprit=latent),
    forward("gates forgotten", plant=edited(without_gates)),
    forward("groups ignored", plant=with_value("blocks.1.mlp", "num_groups", 1)),
]
