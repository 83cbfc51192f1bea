"""The axes of a layer's parameters that a mesh may divide.

A layer declares these axes beside its weight table, under names that say what an axis counts (Flax
calls such names logical axes). The code that creates the mesh decides which mesh axis divides which
name. The results do not depend on which axes are divided, but it is fastest to divide all axes of
one name together.

    class MLP(nnx.Module):
        mesh_axes = last_axis("hidden", "up_proj") | first_axis("hidden", "down_proj.kernel")

Paths are relative to the layer. The path of a submodule stands for all parameters in it. Paths that
an instance does not have are ignored. A model has the declarations of all its layers. A parameter
that is at least as large as a (features, features) matrix needs a declaration, even if it only
declares that the parameter stays `whole`.
"""

from flax import nnx

MeshAxes = dict[str, tuple[str, int] | None]
"""Maps the path of a parameter or a submodule to the name of an axis and its index, or to None if
the parameter is not divided.
"""

VOCABULARY = "vocabulary"
"""The name of the axis of tokens. If a mesh does not divide it evenly, it stays whole, because its
size depends on the text."""


def first_axis(name: str, *paths: str) -> MeshAxes:
    """Names the first axis of parameters, such as the inputs of a matrix.

    >>> first_axis("hidden", "down_proj.kernel")
    {'down_proj.kernel': ('hidden', 0)}
    """
    return dict.fromkeys(paths, (name, 0))


def last_axis(name: str, *paths: str) -> MeshAxes:
    """Names the last axis of parameters, such as the outputs of a matrix and its bias.

    >>> last_axis("hidden", "gate_proj", "up_proj")
    {'gate_proj': ('hidden', -1), 'up_proj': ('hidden', -1)}
    """
    return dict.fromkeys(paths, (name, -1))


def whole(*paths: str) -> MeshAxes:
    """Declares that parameters are not divided."""
    return dict.fromkeys(paths)


def declared_mesh_axes(model: nnx.Module) -> MeshAxes:
    """Returns the declarations of a model's layers, by the paths of its parameters.

    If a layer and one of its submodules declare the same parameter, the submodule's declaration
    counts.

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
