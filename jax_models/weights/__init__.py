"""Convert a layer's parameters to a torch `state_dict`, and back.

A name that is imported as itself is public.
"""

# isort: off
from jax_models.weights.rows import (
    Weight as Weight,
    added as added,
    expanded as expanded,
    flipped as flipped,
    gates as gates,
    parts as parts,
    same as same,
    squeezed as squeezed,
    stacked as stacked,
    summed as summed,
    tied as tied,
    transposed as transposed,
    unused as unused,
)
from jax_models.weights.tables import (
    Layouts as Layouts,
    Table as Table,
    batch_norm as batch_norm,
    conv as conv,
    conv_transpose as conv_transpose,
    dense as dense,
    embedding as embedding,
    group_norm as group_norm,
    layer_norm as layer_norm,
    linear as linear,
    linear_general as linear_general,
    linear_of_image as linear_of_image,
    multi_head_attention as multi_head_attention,
    nested as nested,
    rms_norm as rms_norm,
)
from jax_models.weights.transfer import from_torch as from_torch, to_torch as to_torch
from jax_models.weights.trees import loader as loader
