"""The registry of planted faults: each must be found by the check that is there to find it.

Every case is a row of `parity_tests.registry`, which passes each check without the fault.
"""

from parity_tests.mutations.forward import forward_mutations
from parity_tests.mutations.masks import mask_mutations
from parity_tests.mutations.mutation import Mutation, is_caught
from parity_tests.mutations.training import training_mutations
from parity_tests.mutations.weights import weight_mutations

MUTATIONS = (
    *weight_mutations(),
    *forward_mutations(),
    *mask_mutations(),
    *training_mutations(),
)

__all__ = ["MUTATIONS", "Mutation", "is_caught"]
