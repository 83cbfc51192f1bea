"""S5."""

from functools import partial
from typing import Any

from jax_models import S5
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, mask_ignored, replaced

s5 = partial(paired, architecture="s5", layout="s5")
OTHER: dict[str, Any] = {
    "discretization": "bilinear",
    "clip_eigenvalues": True,
    "conjugate_pairs": False,
    "num_blocks": 2,
    "step_rescale": 0.5,
}
BILINEAR, BOTH = "S5, bilinear, clipped eigenvalues", "S5, both directions"
CASES = [
    s5("S5", partial(S5, 5, 4)),
    s5(BILINEAR, partial(S5, 5, 4, **OTHER)),
    s5(BOTH, partial(S5, 5, 4, bidirectional=True)),
]


def conjugate(layer):
    """Turns the sign of every imaginary part of Λ."""
    layer.Lambda_im[...] = -layer.Lambda_im[...]


def single_output(layer):
    """Forgets the conjugates of the numbers in h."""
    layer.output_scale = 1.0


def other_discretization(layer):
    """Discretizes in the other way."""
    layer.discretization = "zoh" if layer.discretization == "bilinear" else "bilinear"


def keep_eigenvalues(layer):
    """Does not clip the eigenvalues."""
    layer.clip_eigenvalues = False


def keep_step(layer):
    """Ignores the factor of the steps."""
    layer.step_rescale = 1.0


def one_direction(linear_recurrence):
    """Runs both states from the first step to the last."""
    return lambda *args, reverse, **options: linear_recurrence(*args, **options)


OPERATOR = "jax_models.ops.linear_recurrence"
MUTATIONS = [
    Mutation("Λ conjugated", "S5", "weights", edited(conjugate)),
    Mutation("conjugates forgotten", "S5", "forward", edited(single_output)),
    Mutation("bilinear for zero-order hold", "S5", "forward", edited(other_discretization)),
    Mutation("zero-order hold for bilinear", BILINEAR, "forward", edited(other_discretization)),
    Mutation("eigenvalues not clipped", BILINEAR, "forward", edited(keep_eigenvalues)),
    Mutation("steps not rescaled", BILINEAR, "forward", edited(keep_step)),
    Mutation("both directions forward", BOTH, "forward", replaced(OPERATOR, one_direction)),
    *mask_ignored("S5", OPERATOR),
]

COMPARED = {"S5": lambda width, **options: S5(width, width // 2, **options)}
