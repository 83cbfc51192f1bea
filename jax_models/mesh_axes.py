"""Which axes of its parameters a layer allows a mesh to divide.

A layer declares them beside its weight table, under names that say what an axis counts (Flax calls
such names logical axes). Whoever has a mesh decides which of its axes divides which name. Each axis
may be divided by itself: JAX computes the same results, but the names suggest what is fast.

    class MLP(nnx.Module):
        mesh_axes = last_axis("hidden", "up_proj") | first_axis("hidden", "down_proj.kernel")

The paths are below the layer. That of a submodule stands for all parameters in it. Paths that an
instance does not have are ignored. A model inherits the declarations of its layers. Parameters as
large as a matrix from features to features need a declaration, at least that they stay `whole`.
"""

from flax import nnx

MeshAxes = dict[str, tuple[str, int] | None]
"""From the path of a parameter, or of a submodule, to the name of an axis and its index. None: all
devices have all of it."""

VOCABULARY = "vocabulary"
"""The name of an axis that stays whole where a mesh does not divide it: its size is the text's."""


def first_axis(name: str, *paths: str) -> MeshAxes:
    """Names the first axis of parameters, as the inputs of a matrix.

    >>> first_axis("hidden", "down_proj.kernel")
    {'down_proj.kernel': ('hidden', 0)}
    """
    return dict.fromkeys(paths, (name, 0))


def last_axis(name: str, *paths: str) -> MeshAxes:
    """Names the last axis of parameters, as the outputs of a matrix and of its bias.

    >>> last_axis("hidden", "gate_proj", "up_proj")
    {'gate_proj': ('hidden', -1), 'up_proj': ('hidden', -1)}
    """
    return dict.fromkeys(paths, (name, -1))


def whole(*paths: str) -> MeshAxes:
    """Declares that parameters are not divided."""
    return dict.fromkeys(paths)


def declared_mesh_axes(model: nnx.Module) -> MeshAxes:
    """Returns what the layers of a model declare, by the paths of its parameters.

    If a layer and one of its submodules declare the same parameter, the submodule is right.

        >>> declared_mesh_axes(GatedMLP(64, 192, rngs=nnx.Rngs(0)))["down_proj.kernel"]
        ('hidden', 0)
    """
    modules, found = dict(nnx.iter_modules(model)), {}
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        for start in range(len(path)):
            declared = getattr(modules.get(path[:start]), "mesh_axes", {})
            for end in range(start + 1, len(path) + 1):
                if (key := ".".join(map(str, path[start:end]))) in declared:
                    found[".".join(map(str, path))] = declared[key]
    return found
