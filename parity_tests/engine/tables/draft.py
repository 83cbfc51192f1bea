"""Drafts a weight table, for a person to read and complete."""

import contextlib
import dataclasses
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jax_models import weights as rows
from jax_models.checks.values import described
from jax_models.weights import Table, Weight
from jax_models.weights.layouts import counterpart, other_arrays, params_of
from jax_models.weights.rows import join, last_word
from jax_models.weights.stored import as_numpy
from jax_models.weights.trees import is_floating, path_of
from jax_models.weights.wrappers import find_wrapped
from parity_tests.engine.candidates.torch_run import weight_owners
from parity_tests.engine.problem import Arrays
from parity_tests.engine.traces.frameworks import nnx_modules

KINDS = {
    torch.nn.Linear: ("linear",),
    torch.nn.Embedding: ("embedding",),
    torch.nn.modules.conv._ConvNd: ("conv",),
    torch.nn.modules.batchnorm._BatchNorm: ("batch_norm",),
    torch.nn.Module: ("layer_norm", "rms_norm"),
}
"""The helpers of `jax_models.weights` for each kind of module; any class may be a norm."""
GRUS = torch.nn.GRU | torch.nn.GRUCell
NAMES = {
    **dict.fromkeys(("kernel", "w", "scale", "gamma", "embedding", "embeddings"), "weight"),
    **dict.fromkeys(("b", "offset", "beta"), "bias"),
    **dict.fromkeys(("mean", "moving_mean"), "running_mean"),
    **dict.fromkeys(("var", "moving_variance", "variance"), "running_var"),
    "dense_i.kernel": "weight_ih",
    "dense_h.kernel": "weight_hh",
}
"""Torch's name for each name of a weight in JAX's frameworks. The cells of Flax NNX and Equinox
have torch's order of gates, so their kernels correspond."""
TOGETHER = (("query", "key", "value", "out"), ("dense_i", "dense_h"))
"""The parts of an attention and of a recurrent cell in Flax NNX, each of which is one module in
torch."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The weights that a module holds itself, by torch key or by JAX path."""

    name: str
    arrays: Arrays
    module: Any = None
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    """The weight tables of a layer of this package, or of one of its cells. Each has the code of
    its first two arguments of `nested`."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """Rows of a table, and the code that makes them."""

    code: str
    table: Table

    @property
    def names(self) -> set[str]:
        """The JAX paths and torch keys that have a row."""
        return {name for row in self.table if row.params for name in (*row.params, *row.keys)}


def draft_table(twin: torch.nn.Module, model: Any) -> str:
    """Drafts the code of a weight table for a torch module and its port, to read and complete.

        >>> print(draft_table(torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
        from jax_models.weights import linear
        <BLANKLINE>
        table = [
            *linear("", ""),
        ]

    Two modules are paired if their shapes fit their kind of layer, and if either no other pair is
    possible, or their names, numbers or order decide. Ambiguous rows and leftover weights are
    written as comments, and `compare` refuses a table with gaps until a person completes it.

    Args:
        twin: the torch module.
        model: an `nnx.Module`, or a tree of arrays (Linen's variables, an Equinox module, haiku's
            parameters), for which the code makes a loader.

    """
    if not isinstance(twin, torch.nn.Module):
        raise TypeError(f"twin: expected a torch.nn.Module, got {described(twin)}")

    # Pair the parts of both sides. Rows that are in doubt are only comments.
    jax_side = jax_parts(model)
    torch_side = torch_parts(twin, [table for part in jax_side for table in part.tables.values()])
    drafts, doubts = pair_parts(torch_side, jax_side)
    lines = [f"{draft.code}," for draft in drafts]
    lines += [f"# {',  # or '.join(draft.code for draft in each)}," for each in doubts]

    # List every weight that has no row, not even an ambiguous one.
    covered = {name for each in (drafts, *doubts) for draft in each for name in draft.names}
    arrays = {name: array for part in jax_side for name, array in part.arrays.items()}
    weights = {key: twin.state_dict()[key] for key in weight_owners(twin)}
    for each in (each for each in find_wrapped(weights) if not each.is_prefix):
        lines.append(f"# keys of {each.description}")
        covered |= {*each.keys}
    is_tree = not isinstance(model, nnx.Module)
    others = {} if is_tree else other_arrays(model)
    for kind, named in (("parameter", arrays), ("key", weights)):
        for name, shape in ((name, tuple(array.shape)) for name, array in named.items()):
            if name not in covered:
                hint = counterpart(name, shape, others) if kind == "key" else ""
                lines.append(f"# the {kind} {name}, shape {shape}, has no row{hint}")

    # Write the code, with the imports that it needs.
    code = "".join(f"    {line}\n" for line in lines)
    used_helpers = {name for name in vars(rows) if re.search(rf"\b{name}\(", code)}
    names = ", ".join(sorted(used_helpers | ({"loader"} if is_tree else set())))
    load = (
        "\nweights = loader(model, table)  # `model` is the tree that you gave to `draft_table`"
        if is_tree
        else ""
    )
    imports = f"from jax_models.weights import {names}\n\n" if names else ""
    return f"{imports}table = [\n{code}]{load}"


def torch_parts(twin: torch.nn.Module, tables: Sequence[Table]) -> list[Part]:
    """The modules that hold weights themselves.

    Attention, and a module with exactly the keys of one of the tables, is one part together with
    its submodules. Weights that a wrapper such as weight norm stores as something else belong to no
    part.
    """
    used = [[row for row in table if row.params] for table in tables]
    owners = weight_owners(twin)
    wrapped = {key for each in find_wrapped(owners) if not each.is_prefix for key in each.keys}
    weights = {k: as_numpy(twin.state_dict()[k].double()) for k in owners if k not in wrapped}
    parts: list[Part] = []
    for name, module in twin.named_modules(remove_duplicate=False):
        start = join(name, "")
        inside = {key.removeprefix(start): key for key in weights if key.startswith(start)}
        is_whole = isinstance(module, torch.nn.MultiheadAttention) or any(
            inside.keys() == {key for row in table for key in row.for_keys(inside).keys}
            for table in used
        )
        own = [k for i, k in inside.items() if is_whole or ("." not in i and owners[k] == k)]
        parts += [Part(name, {key: weights.pop(key) for key in own}, module)] if own else []
    return parts


def jax_parts(model: Any) -> list[Part]:
    """The parts of a module or a tree that hold arrays. Attention and cells are also one part each.

    A layer of this package, which has weight tables, is a single part. The layers and the cells
    inside it are further parts, for a torch module that is divided in another way.
    """
    layers: list[Part] = []
    if isinstance(model, nnx.Module):
        arrays = {path: np.asarray(p.get_value(), float) for path, p in params_of(model).items()}
        layers = [part for at in nnx_modules(model) for part in layer_parts(*at, arrays)]
    else:
        flat = jax.tree_util.tree_leaves_with_path(model)
        leaves = {path_of(path): a for path, a in flat if hasattr(a, "shape") and is_floating(a)}
        arrays = {path: np.asarray(leaf, float) for path, leaf in leaves.items()}
    if not arrays:
        got = described(model)
        raise TypeError(f"model: expected an nnx.Module or a tree of arrays, got {got}")
    in_layers = {path for part in layers for path in part.arrays}
    places: dict[str, Arrays] = {}
    for path, array in arrays.items():
        place = re.sub(r"^(params|batch_stats)\.", "", path).rpartition(".")[0]
        if path not in in_layers:
            places.setdefault(place, {})[path] = array
    for names in TOGETHER:
        for first in [place for place in places if last_word(place) == names[0]]:
            whole = first.removesuffix(names[0]).rstrip(".")
            inside = [places.get(join(whole, name), {}) for name in names]
            if all(inside):
                places[whole] = dict(ChainMap(places.get(whole, {}), *inside))
    return [*layers, *(Part(name, arrays) for name, arrays in places.items())]


def layer_parts(place: str, layer: Any, arrays: Arrays) -> Iterator[Part]:
    """A layer of this package and its cells, which have weight tables; nothing for other modules.

    `arrays` are those of the whole model.
    """
    if not hasattr(layer, "torch_layouts"):
        return
    path = "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in place.split(".") if p)
    tables = {
        f'model{path}.torch_layouts()["{layout}"], "{place}"': rows.nested(table, place, "")
        for layout, table in layer.torch_layouts().items()
    }
    inside = {p: array for p, array in arrays.items() if p.startswith(join(place, ""))}
    yield Part(place, inside, layer, tables)
    for i, table in enumerate(layer.cell_tables() if hasattr(layer, "cell_tables") else []):
        of_cell = rows.nested(table, place, "")
        inside = {path: arrays[path] for row in of_cell for path in row.params}
        code = f'model{path}.cell_table({i}), "{place}"'
        yield Part(join(place, f"cells.{i}"), inside, layer, {code: of_cell})


def pair_parts(
    torch_side: list[Part], jax_side: list[Part]
) -> tuple[list[Draft], list[list[Draft]]]:
    """The drafts for parts that certainly correspond, and lists of drafts for the others."""
    options = {
        (part.name, place.name): draft
        for part in torch_side
        for place in jax_side
        if (draft := fitting_draft(part, place)) is not None
    }
    chosen: list[Draft] = []
    for _ in range(2):  # a choice may leave a single possibility for the others
        groups: dict[frozenset[str], list[str]] = {}
        for key in dict.fromkeys(key for key, _ in options):
            groups.setdefault(frozenset(p for k, p in options if k == key), []).append(key)
        for places, keys in groups.items():
            for pair in pairs_by_name(keys, places):
                if pair in options:
                    chosen.append(options[pair])
                    taken = chosen[-1].names
                    options = {p: draft for p, draft in options.items() if not draft.names & taken}
    keys = dict.fromkeys(key for key, _ in options)
    return chosen, [[draft for (k, _), draft in options.items() if k == key] for key in keys]


def pairs_by_name(keys: Collection[str], places: Collection[str]) -> Iterable[tuple[str, str]]:
    """Pairs of names that have the same words and numbers, or else the same order.

    There are none if the names do not decide.
    """
    if len(keys) != len(places):
        return ()
    for length in (99, 1, 0):  # compare the last word, its initial (`q_proj`, `query`), or neither
        named, at_place = (
            {(*re.findall(r"\d+", name), last_word(name)[:length]): name for name in side}
            for side in (keys, places)
        )
        if named.keys() == at_place.keys() and len(named) == len(keys):
            return [(key, at_place[word]) for word, key in named.items()]
    if all(len({re.sub(r"\d+", "", name) for name in side}) == 1 for side in (keys, places)):
        return zip(*(sorted(side, key=numbers_in) for side in (keys, places)), strict=True)
    return ()


def numbers_in(name: str) -> list[int]:
    """The numbers in a name, such as the indices of a layer."""
    return [int(number) for number in re.findall(r"\d+", name)]


def fitting_draft(part: Part, place: Part) -> Draft | None:
    """The draft that loads a torch module's weights into a JAX place; None if none fits."""
    arrays = {**part.arrays, **place.arrays}
    for draft in candidate_drafts(part, place):
        left = arrays.keys() - draft.names
        # A GRU applies its reset gate between its two biases, so they cannot be added: a cell with
        # a single bias leaves biases without a row.
        is_gru = isinstance(part.module, GRUS) and all("bias" in name for name in left)
        if not draft.table or not draft.names <= arrays.keys() or (left and not is_gru):
            continue
        with contextlib.suppress(ValueError):  # the shapes cannot be rearranged this way
            for rearranged in (each for each in draft.table if each.params):
                made = rearranged.to_jax(*(arrays[key] for key in rearranged.keys))
                if [a.shape for a in made] != [arrays[path].shape for path in rearranged.params]:
                    break
            else:
                return draft
    return None


def candidate_drafts(part: Part, place: Part) -> Iterator[Draft]:
    """The drafts for a torch module of this kind in a JAX place, the likeliest first."""
    # A layer of this package has its own tables, and needs no other.
    kind, names = part.module, (place.name, part.name)
    for code, table in place.tables.items():
        table = [
            row.for_keys(part.arrays)._replace(params=row.params)
            for row in rows.nested(table, "", part.name)
        ]
        yield Draft(f'*nested({code}, "{part.name}")', table)
    if place.module is not None:
        return
    if any(path.startswith("params.") for path in place.arrays):
        names = (f"params.{place.name}".rstrip("."), part.name)

    # Otherwise try the helpers for this kind of module, then a row for each key.
    helpers: list[tuple[str, dict[str, Any]]]
    helpers = [(name, {}) for each in KINDS if isinstance(kind, each) for name in KINDS[each]]
    if isinstance(kind, torch.nn.MultiheadAttention):
        sizes = {"num_heads": kind.num_heads, "features": kind.embed_dim}
        other = {} if kind.kdim == kind.embed_dim else {"kv_features": kind.kdim}
        helpers = [("multi_head_attention", sizes | other)]
    if isinstance(kind, torch.nn.modules.conv._ConvTransposeNd):
        groups = {} if kind.groups == 1 else {"groups": kind.groups}
        helpers = [("conv_transpose", groups), ("conv_transpose", {"transpose_kernel": True})]
    stats = [p.rpartition(".")[0] for p in place.arrays if p.startswith("batch_stats")]
    for options in ({"stats": stats[0]} if stats else {}, {"bias": False}, {"affine": False}):
        for helper, sizes in helpers:
            with contextlib.suppress(TypeError):  # not all helpers have these options
                yield draft_row(helper, *names, **sizes, **options)
    yield from drafts_by_name(part, place)


def drafts_by_name(part: Part, place: Part) -> Iterator[Draft]:
    """A row for each key, paired by the name that the weight has in the JAX framework."""
    paths = {
        NAMES.get(".".join(path.split(".")[-2:]))
        or NAMES.get(last_word(path))
        or last_word(path): path
        for path in place.arrays
    }
    keys = {last_word(key).removesuffix("_l0"): key for key in part.arrays}
    if len(paths) == len(keys) == 1 and not {*keys} & {*NAMES.values(), "weight_ih"}:
        paths = dict(zip(keys, paths.values(), strict=True))  # both are alone, so names may differ
    drafts: list[Draft] = []
    if "bias" in paths and "bias_ih" in keys and not isinstance(part.module, GRUS):
        drafts.append(draft_row("added", paths["bias"], (keys.pop("bias_ih"), keys.pop("bias_hh"))))
    for name in [name for name in keys if name in paths]:
        key, path = keys[name], paths[name]
        array = part.arrays[key]
        kinds = ["same", "transposed" if array.ndim == 2 else "flipped"][: max(array.ndim, 1)]
        kinds = kinds[::-1] if last_word(path) in ("kernel", "w") else kinds
        options = [draft_row(kind, path, key) for kind in kinds]
        shape = place.arrays[path].shape
        drafts += [each for each in options if each.table[0].to_jax(array)[0].shape == shape][:1]
    table = [each for draft in drafts for each in draft.table]
    yield Draft(",\n    ".join(draft.code for draft in drafts), table)


def draft_row(helper: str, *args: Any, **options: Any) -> Draft:
    """The rows that a helper of `jax_models.weights` makes, and the code that calls it."""
    made = getattr(rows, helper)(*args, **options)
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())]
    call = f"{helper}({', '.join(given)})".replace("'", '"')
    return Draft(call, [made]) if isinstance(made, Weight) else Draft(f"*{call}", made)
