"""Draft a weight table, for a person to read: what goes together by name, shape and values."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from math import prod
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from scipy.optimize import linear_sum_assignment

from jax_models import weights as rows
from jax_models.ops.checks import described
from jax_models.weights import Table, Weight
from jax_models.weights.constant import Constant
from jax_models.weights.rows import at
from jax_models.weights.stored import as_numpy
from jax_models.weights.trees import is_floating, path_of
from parity_tests.engine.locate.frameworks import nnx_modules
from parity_tests.engine.problem import Arrays

ROLES = {
    "weight": "weight kernel w scale gamma embedding embeddings",
    "bias": "bias b offset beta",
    "running_mean": "running_mean mean moving_mean",
    "running_var": "running_var var moving_variance variance",
}
"""torch's names of weights, and those of JAX's frameworks."""
ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split()}
SYNONYMS = {
    "attn": "attention", "dense": "linear", "fc": "linear", "proj": "linear", "ln": "norm",
    "layernorm": "norm", "bn": "norm", "batchnorm": "norm", "wte": "embedding",
    "embed": "embedding", "emb": "embedding", "q": "query", "k": "key", "v": "value", "o": "out",
    "output": "out", "h": "layers", "layer": "layers", "blocks": "layers", "block": "layers",
    "i": "ih",
}  # fmt: skip
COLLECTION = re.compile(r"^(params|batch_stats)\.")
HEADS = ("query", "key", "value", "out")
CLEAR = 0.2
"""By how much a match must be better than one with another."""
SURE = 10.0
"""What equal values add to a match."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module's own weights, by key or by path."""

    name: str
    arrays: Arrays
    module: Any = None


@dataclasses.dataclass(frozen=True)
class Draft:
    """A row or a helper's rows, and the code that makes them."""

    code: str
    table: Table
    score: float = 0.0
    certain: bool = True
    """Whether no other row is possible. If False, the code is written as a comment."""


def draft_table(twin: torch.nn.Module, model: Any) -> str:
    """Code of a weight table for a torch module and its JAX port, to read, complete and paste.

        >>> print(draft_table(torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
        from jax_models.weights import linear
        <BLANKLINE>
        table = [
            *linear("", ""),
        ]

    Keys and parameters go together that have the same values, or else shapes that fit, as their
    kinds of layer imply, and names or numbers alike. What could go with several, and what is left
    over, are comments: the table is refused until they are completed.

    Args:
        twin: the torch module.
        model: an `nnx.Module`, or a tree of arrays (Linen's variables, an Equinox module, haiku's
            parameters), for which the code makes a loader.

    """
    if not isinstance(twin, torch.nn.Module):
        raise TypeError(f"twin: expected a torch.nn.Module, got {described(twin)}")
    ours = jax_units(model)
    theirs = torch_units(twin, [keys for unit in ours for keys in key_sets(unit)])
    drafts, doubts = matched(theirs, ours)
    known = [*drafts, *(each for candidates in doubts for each in candidates)]
    paths, keys = (
        {name for draft in known for row in draft.table for name in getattr(row, side)}
        for side in ("params", "keys")
    )
    left_paths, left_keys = (
        {name: array for unit in units for name, array in unit.arrays.items() if name not in found}
        for units, found in ((ours, paths), (theirs, keys))
    )
    of_layers = {path for unit in ours if unit.module is not None for path in unit.arrays}
    free = {path: array for path, array in left_paths.items() if path not in of_layers}
    for draft in leftovers(left_keys, free, drafts, twin):
        for row in draft.table:
            drafts = [each for each in drafts if not {*row.params} & _paths(each)]
            for name in (*row.params, *row.keys):
                for left in (left_paths, free, left_keys):
                    left.pop(name, None)
        drafts.append(draft)
    lines = [f"{d.code}," if d.certain else f"# {d.code},  # not certain" for d in drafts]
    for first, *others in doubts:
        lines.append(f"# {first.code},  # or {', or '.join(each.code for each in others)}")
    lines += [
        f"# the parameter {path}, shape {a.shape}, has no row" for path, a in left_paths.items()
    ]
    lines += [f"# the key {key}, shape {a.shape}, has no row" for key, a in left_keys.items()]
    code = "".join(f"    {line}\n" for line in lines)
    used = {name for name in rows.__all__ if re.search(rf"\b{name}\(", code)}
    is_tree = not isinstance(model, nnx.Module)
    names = ", ".join(sorted(used | ({"loader"} if is_tree else set())))
    load = "\nweights = loader(model, table)  # `model` is the tree" if is_tree else ""
    imports = f"from jax_models.weights import {names}\n\n" if names else ""
    return f"{imports}table = [\n{code}]{load}"


def _paths(draft: Draft) -> set[str]:
    return {path for row in draft.table for path in row.params}


def key_sets(unit: Unit) -> list[set[str]]:
    """The keys of each weight table of a layer, if it has any."""
    layouts = unit.module.torch_layouts() if unit.module is not None else {}
    return [_keys(Draft("", [row for row in t if row.params])) for t in layouts.values()]


def torch_units(twin: torch.nn.Module, whole_keys: Sequence[set[str]] = ()) -> list[Unit]:
    """The modules with weights of their own.

    Attention, and modules whose keys are one of `whole_keys`, are not split into their parts.
    """
    state_dict = {
        key: as_numpy(value.double())
        for key, value in twin.state_dict().items()
        if value.is_floating_point()
    }
    units, taken = [], set()
    for name, module in twin.named_modules(remove_duplicate=False):
        whole = isinstance(module, torch.nn.MultiheadAttention) or {
            key.removeprefix(at(name, "")) for key in state_dict if key.startswith(at(name, ""))
        } in [*whole_keys]
        arrays = {
            key: array
            for key, array in state_dict.items()
            if key not in taken
            and (key.startswith(at(name, "")) or not name)
            and (whole or "." not in key[len(at(name, "")) :])
        }
        taken |= arrays.keys()
        if arrays:
            units.append(Unit(name, arrays, module))
    return units


def jax_units(model: Any) -> list[Unit]:
    """The parts of a module or a tree that have arrays of their own; attention with its parts."""
    layers: dict[str, nnx.Module] = {}
    if isinstance(model, nnx.Module):
        for place, module in nnx_modules(model):
            is_inside = any(place.startswith(at(outer, "")) for outer in layers)
            if hasattr(module, "torch_layouts") and not is_inside:
                layers[place] = module
        flat = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat, Constant)))
        arrays = {".".join(map(str, path)): np.asarray(v.get_value(), float) for path, v in flat}
    else:
        arrays = {
            path_of(path): np.asarray(leaf, float)
            for path, leaf in jax.tree_util.tree_leaves_with_path(model)
            if hasattr(leaf, "shape") and is_floating(leaf)
        }
    if not arrays:
        raise TypeError(
            f"model: expected an nnx.Module or a tree of arrays, got {described(model)}"
        )
    groups: dict[str, Arrays] = {}
    for path in sorted(arrays, key=_natural):
        place = COLLECTION.sub("", path).rpartition(".")[0]
        place = next((each for each in layers if path.startswith(at(each, ""))), place)
        groups.setdefault(place, {})[path] = arrays[path]
    for place in [
        name.removesuffix("query").rstrip(".") for name in groups if _last(name) == "query"
    ]:
        parts = [at(place, part) for part in HEADS]
        if all(part in groups for part in parts):
            groups[place] = groups.get(place, {})
            for part in parts:
                groups[place] |= groups[part]
    return [Unit(name, group, layers.get(name)) for name, group in groups.items()]


def matched(theirs: list[Unit], ours: list[Unit]) -> tuple[list[Draft], list[list[Draft]]]:
    """The rows of units that go together, and for those in doubt the rows that there could be."""
    options = {
        (i, j): draft
        for i, unit in enumerate(theirs)
        for j, place in enumerate(ours)
        if (draft := fitting(unit, place)) is not None
    }
    scores = np.full((len(theirs), len(ours)), -1e3)
    for (i, j), draft in options.items():
        scores[i, j] = draft.score + _alike(theirs[i].name, ours[j].name)
    for i, j in _in_order(options, theirs, ours):
        scores[i, j] += 1
    chosen = [
        pair
        for pair in zip(*map(list, linear_sum_assignment(-scores)), strict=True)
        if pair in options
    ]
    drafts, doubts = [], []
    for i, j in chosen:
        rivals = [
            options[i, other_j]
            for other_i, other_j in chosen
            if (i, other_j) in options
            and (other_i, j) in options
            and other_i != i
            and scores[i, j] + scores[other_i, other_j]
            < scores[i, other_j] + scores[other_i, j] + CLEAR
        ]
        taken = {path for draft in drafts for path in _paths(draft)}
        if _paths(options[i, j]) & taken:
            continue
        if rivals:
            doubts.append([options[i, j], *rivals])
        else:
            drafts.append(options[i, j])
    return drafts, doubts


def _in_order(
    options: Mapping[tuple[int, int], Draft], theirs: list[Unit], ours: list[Unit]
) -> Iterator[tuple[int, int]]:
    """The pairs of units that fit each other and differ in numbers alone, in their order."""
    groups: dict[frozenset[int], list[int]] = {}
    for i in range(len(theirs)):
        groups.setdefault(frozenset(j for k, j in options if k == i), []).append(i)
    for partners, members in groups.items():
        places = sorted(partners, key=lambda j: _natural(ours[j].name))
        names = [[_words(theirs[i].name) for i in members], [_words(ours[j].name) for j in places]]
        if len(members) == len(places) and all(len({*map(tuple, each)}) == 1 for each in names):
            yield from zip(
                sorted(members, key=lambda i: _natural(theirs[i].name)), places, strict=True
            )


def fitting(unit: Unit, place: Unit) -> Draft | None:
    """The rows for a torch module's weights in a place, if their shapes fit."""
    for draft in candidates(unit, place):
        table = draft.table
        if _paths(draft) != place.arrays.keys():
            continue
        if {key for row in table if row.params for key in row.keys} != unit.arrays.keys():
            continue
        try:
            made = [
                (value, place.arrays[path])
                for row in table
                if row.params
                for path, value in zip(
                    row.params, row.to_jax(*(unit.arrays[key] for key in row.keys)), strict=True
                )
            ]
        except ValueError:  # shapes that cannot be turned so
            continue
        if all(value.shape == array.shape for value, array in made):
            return dataclasses.replace(draft, score=_of_values(made))
    return None


def candidates(unit: Unit, place: Unit) -> Iterator[Draft]:
    """What could be meant, the likeliest first."""
    kind, names = unit.module, (place.name, unit.name)
    if place.module is not None:
        path = "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in place.name.split(".") if p)
        for layout, table in place.module.torch_layouts().items():
            code = f'*nested(model{path}.torch_layouts()["{layout}"], {_literal(place.name)}, '
            yield Draft(f"{code}{_literal(unit.name)})", rows.nested(table, *names))
        return
    stats = next((p.rpartition(".")[0] for p in place.arrays if p.startswith("batch_stats")), None)
    inside = {path: _last(path) for path in place.arrays}
    where = next((p.rpartition(".")[0] for p in inside if inside[p] in ROLE_OF), place.name)
    if stats is not None or where.startswith("params"):
        names = (f"params.{place.name}".rstrip("."), unit.name)
    no_bias = {} if any(_last(key) == "bias" for key in unit.arrays) else {"bias": False}
    if isinstance(kind, torch.nn.MultiheadAttention):
        options: dict[str, Any] = {"num_heads": kind.num_heads, "features": kind.embed_dim}
        if kind.kdim != kind.embed_dim:
            options["kv_features"] = kind.kdim
        if kind.in_proj_bias is None:
            options["bias"] = False
        yield helper("multi_head_attention", *names, **options)
    elif isinstance(kind, torch.nn.Linear):
        yield helper("linear", *names, **no_bias)
        shape = next((a.shape for p, a in place.arrays.items() if inside[p] == "kernel"), ())
        for i in range(1, len(shape)):
            if prod(shape[:i]) == kind.in_features and len(shape) > 2:
                ins, outs = shape[:i], shape[i:]
                yield helper("linear_general", *names, in_shape=ins, out_shape=outs, **no_bias)
    elif isinstance(kind, torch.nn.modules.conv._ConvTransposeNd):
        groups = {} if kind.groups == 1 else {"groups": kind.groups}
        yield helper("conv_transpose", *names, **no_bias, **groups)
        yield helper("conv_transpose", *names, **no_bias, transpose_kernel=True)
    elif isinstance(kind, torch.nn.modules.conv._ConvNd):
        yield helper("conv", *names, **no_bias)
    elif isinstance(kind, torch.nn.modules.batchnorm._BatchNorm):
        options = {} if kind.affine else {"affine": False}
        yield helper("batch_norm", *names, **options, **({"stats": stats} if stats else {}))
    elif isinstance(kind, torch.nn.GroupNorm):
        yield helper("group_norm", *names)
    elif isinstance(kind, torch.nn.Embedding):
        yield helper("embedding", *names)
    else:
        yield helper("rms_norm", *names) if no_bias else helper("layer_norm", *names)
        yield helper("layer_norm", *names, **no_bias)
    yield from _one_by_one(unit, place, inside)


def _one_by_one(unit: Unit, place: Unit, inside: Mapping[str, str]) -> Iterator[Draft]:
    """Row by row, each key with the path of its role or of its name."""
    drafts = []
    for key, array in unit.arrays.items():
        wanted = _last(key)
        paths = [p for p, name in inside.items() if wanted in (name, ROLE_OF.get(name))]
        if len(paths) != 1:
            return
        draft = single(key, array, paths[0], place.arrays[paths[0]])
        if draft is None:
            return
        drafts.append(draft)
    yield Draft(",\n    ".join(d.code for d in drafts), [row for d in drafts for row in d.table])


def single(key: str, array: np.ndarray, path: str, like: np.ndarray) -> Draft | None:
    """The row of one key and one path, if their shapes fit."""
    turned = "transposed" if array.ndim == 2 else "flipped"
    kinds = (turned, "same") if _last(path) in ("kernel", "w") else ("same", turned)
    for kind in kinds if array.ndim > 1 else ("same",):
        draft = helper(kind, path, key)
        if draft.table[0].to_jax(array)[0].shape == like.shape:
            return draft
    for kind, more, less in (("expanded", like, array), ("squeezed", array, like)):
        axes = tuple(i for i, n in enumerate(more.shape) if n == 1)
        if axes and tuple(n for n in more.shape if n != 1) == less.shape:
            return helper(kind, path, key, axes)
    return None


def leftovers(
    keys: Arrays, paths: Arrays, drafts: list[Draft], twin: torch.nn.Module
) -> Iterator[Draft]:
    """Rows of what is left: keys that share a weight, biases that are added, and single ones."""
    values = twin.state_dict(keep_vars=True)
    for draft in drafts:
        for row in draft.table:
            twins = [k for k in keys if len(row.keys) == 1 and values[k] is values[row.keys[0]]]
            if len(twins) == 1 and len(draft.table) == 1:
                yield helper("tied", row.params[0], (row.keys[0], twins[0]))
    for first in [key for key in keys if "bias_ih" in key]:
        second = first.replace("bias_ih", "bias_hh")
        fits = [p for p, a in paths.items() if a.shape == keys[first].shape]
        is_gru = isinstance(owner(twin, first), torch.nn.GRU | torch.nn.GRUCell)
        # a GRU applies its reset gate between its two biases, so they cannot be added
        if second in keys and len(fits) == 1 and not is_gru:
            draft = helper("added", fits[0], (first, second))
            yield dataclasses.replace(draft, certain=_has_gates_of_torch(fits[0]))
    scored = sorted(
        (
            (_of_values([(draft.table[0].to_jax(array)[0], like)]) + _alike(key, path), draft)
            for key, array in keys.items()
            for path, like in paths.items()
            if (draft := single(key, array, path, like)) is not None
        ),
        key=lambda each: -each[0],
    )
    alternatives = Counter(name for _, d in scored for name in (*_paths(d), *_keys(d)))
    for score, draft in scored:
        (key,), (path,) = draft.table[0].keys, draft.table[0].params
        if key in keys and path in paths:
            is_only = alternatives[key] == alternatives[path] == 1
            has_gates = isinstance(owner(twin, key), torch.nn.RNNBase | torch.nn.RNNCellBase)
            certain = is_only and (not has_gates or _has_gates_of_torch(path))
            yield dataclasses.replace(draft, certain=certain or score >= SURE)


def owner(twin: torch.nn.Module, key: str) -> torch.nn.Module:
    """The module that holds a weight."""
    return twin.get_submodule(key.rpartition(".")[0])


def _has_gates_of_torch(path: str) -> bool:
    """Whether it is a weight of a Flax or Equinox cell, whose gates are in torch's order."""
    return bool({*path.split(".")} & {"dense_i", "dense_h", "weight_ih", "weight_hh"})


def _keys(draft: Draft) -> set[str]:
    return {key for row in draft.table for key in row.keys}


def helper(name: str, *args: Any, **options: Any) -> Draft:
    """What a helper of `jax_models.weights` makes, and the call."""
    made = getattr(rows, name)(*args, **options)
    given = [*map(_literal, args), *(f"{k}={_literal(v)}" for k, v in options.items())]
    call = f"{name}({', '.join(given)})"
    return Draft(call, [made]) if isinstance(made, Weight) else Draft(f"*{call}", made)


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _of_values(made: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """How well values match: `SURE` if all are equal and they are not all one number."""
    if not all(np.allclose(value, array, rtol=1e-6, atol=0) for value, array in made):
        return 0.0
    return SURE if any(np.ptp(array) > 0 for _, array in made) else 0.1


def _alike(name: str, path: str) -> float:
    """How much names have in common: words, numbers and letters, between 0 and 3."""
    words, others = {*_words(name)}, {*_words(path)}
    shared = len(words & others) / len(words | others) if words | others else 1.0
    numbers = _numbers(name) == _numbers(path) and bool(_numbers(name))
    return shared + numbers + SequenceMatcher(None, _last(name), _last(path)).ratio() / 2


def _words(name: str) -> list[str]:
    split = map(str.lower, re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))
    return [SYNONYMS.get(word) or word for word in split]


def _numbers(name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", name)]


def _natural(name: str) -> list[Any]:
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.findall(r"\d+|\D+", name)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
