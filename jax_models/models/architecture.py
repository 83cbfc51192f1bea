"""Declarations of an architecture in its config class, and the search for these classes.

Each model has a config class. The class says how to recognize the model's checkpoints, which keys
each layout uses, and how to read the fields of the config from the shapes of a checkpoint.
`architectures` finds all config classes, including those of other packages.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from jax_models.checks.arguments import Scope
from jax_models.checks.values import SCALARS, described
from jax_models.entry_points import by_name, modules_of
from jax_models.options import CheckedFields
from jax_models.weights.arguments import checked_names
from jax_models.weights.keys import checked_mapping, joined
from jax_models.weights.places import locate_keys
from jax_models.weights.rows import Weight
from jax_models.weights.stored import as_numpy

ENTRY_POINTS = "twinscan.models"
"""The entry point group in which other packages name the modules of their models."""

Fields = Mapping[str, Any]

UNDETERMINED = object()
"""A source for `Layout.sizes`: the caller must give the field, because no shape determines it."""


class Size(NamedTuple):
    """A field of a config that is the size of one axis of one weight, or the value of a scalar.

        Size("*.mlp.up_proj.weight", 0)  # the number of rows of a matrix in a block
        Size("*.esn.leak")  # the value of a weight without axes in a block
        Size("pos_embedding.weight", 0)  # the number of rows of a matrix outside the blocks

    In a key that begins with `*.`, the `*` stands for the prefix of the blocks and the number of
    the lowest block that has such a weight: `*.esn.leak` for `blocks.0.esn.leak`. The key
    `blocks.esn.leak`, with the prefix but without the number, means the same. Any other key is a
    full key.
    """

    key: str
    axis: int | None = None
    """The axis whose size is the field. None: the weight is a scalar, whose value is the field."""
    rank: int | None = None
    """The number of axes that the weight must have. None: any number."""
    convert: Callable[[Any, Fields], Any] = lambda size, fields: size
    """Computes the field from the size and from the fields that the table lists before it."""


class Mark(NamedTuple):
    """Parts of keys that identify a checkpoint.

        Mark(has=(".mixer.dt_bias",), lacks=(".mixer.q_proj.",))

    Some key contains `.mixer.dt_bias`, and no key contains `.mixer.q_proj.`.
    """

    has: tuple[str, ...]
    """Substrings, each of which occurs in some key."""
    lacks: tuple[str, ...] = ()
    """Substrings that occur in no key."""

    def fits(self, keys: Sequence[str]) -> bool:
        """Whether a checkpoint with these keys has the mark."""
        has, lacks = (
            [any(part in key for key in keys) for part in parts] for parts in (self.has, self.lacks)
        )
        return all(has) and not any(lacks)


def check_marks(name: str, marks: Any) -> None:
    """Raises an error unless marks are a tuple of strings and of `Mark`s of such tuples."""
    is_flat = not isinstance(marks, Mark) and isinstance(marks, tuple)
    if not (is_flat and all(isinstance(mark, str | Mark) for mark in marks)):
        raise TypeError(f"{name}: expected a tuple of strings and Marks, got {marks!r}")
    for mark in marks:
        for part in mark if isinstance(mark, Mark) else ():
            if not (isinstance(part, tuple) and all(isinstance(each, str) for each in part)):
                raise TypeError(f"{name}: expected tuples of strings in a Mark, got {part!r}")


class Layout(NamedTuple):
    """The keys of a checkpoint, for `torch_layouts` and `from_state_dict`."""

    embedding: str
    """Key of the token embedding."""
    blocks: str
    """Prefix of the blocks. The number of a block follows, unless the model has a single layer."""
    norm: str
    """Key of the last norm's scale. The key of its bias ends with `bias` instead."""
    head: str | None = None
    """Key of the head's kernel; the key of its bias ends with `bias`. None: there is no head."""
    repeats_embedding: bool = True
    """If the head is tied: whether `to_torch` writes the embedding again under the head's key.
    Import reads checkpoints with and without this key.
    """
    positions: Weight | None = None
    """The row of the position embedding."""
    blocks_layout: str | None = None
    """The name of the blocks' layout. None: the same name as this layout."""
    sizes: Mapping[str, Any] = {}
    """The sources from which to read the fields of the config. `vocab_size` and `features` are the
    sizes of the embedding, and `num_layers` is the number of the blocks, unless they are given,
    too.

    The source of a field is a `Size`, a function of the `Checkpoint` and of the fields before it,
    or a constant. It can also be a tuple of `Size`s, whose last item may be any source: the first
    `Size` whose weight exists is used, otherwise the last item. `...` stands for the field's
    default, and `UNDETERMINED` for a field that the caller must give.
    """


class Checkpoint:
    """A state_dict, read in one layout to find the fields of a config."""

    def __init__(self, state_dict: Mapping[str, Any], layout: Layout):
        self.weights = {str(key): value for key, value in state_dict.items()}
        self.layout = layout
        self.missing: list[str] = []
        """The keys that a field needs but the state_dict lacks."""

    @functools.cached_property
    def numbers(self) -> list[str]:
        """The numbers of the blocks, which follow the prefix of the blocks in the keys."""
        prefix = f"{self.layout.blocks}."
        found = {
            key.removeprefix(prefix).split(".")[0] for key in self.weights if key.startswith(prefix)
        }
        return sorted(found, key=lambda number: (len(number), number))

    def find(self, key: str) -> str | None:
        """The full key of a weight, in the lowest block that has it, or None if no block has it."""
        start = f"{self.layout.blocks}."
        if key not in self.weights and key.startswith(start):
            key = f"*.{key.removeprefix(start)}"
        keys = (whole_key(self.layout, key, number) for number in self.numbers or "0")
        return next((key for key in keys if key in self.weights), None)

    def size(self, key: str, axis: int | None, rank: int | None = None) -> Any:
        """The size of an axis, or a scalar. If it is missing, returns None and notes its key."""
        if key not in self.weights:
            self.missing.append(key)
            return None
        weight = self.weights[key]
        shape = tuple(getattr(weight, "shape", ()))
        if axis is None and shape:
            raise ValueError(
                f"state_dict: {key}: expected a scalar, got shape {shape}; to read the size of an "
                "axis, give Size the axis"
            )
        if axis is None:
            return as_numpy(weight).item()
        if not -len(shape) <= axis < len(shape) or rank not in (None, len(shape)) or 0 in shape:
            expected = f"{rank} axes" if rank is not None else f"an axis {axis}"
            hint = "; to read the value of a scalar, give Size no axis" if not shape else ""
            raise ValueError(
                f"state_dict: {key}: expected {expected}, none empty, got {shape}{hint}"
            )
        return int(shape[axis])

    def field(self, source: Any, fields: Fields) -> Any:
        """Reads a field of the config from its source in the layout's `sizes`."""
        if isinstance(source, tuple) and not isinstance(source, Size):
            *first, last = source
            there = (each for each in first if self.find(each.key) is not None)
            source = next(there, last)
        if isinstance(source, Size):
            key = self.find(source.key) or whole_key(self.layout, source.key)
            size = self.size(key, source.axis, source.rank)
            return None if size is None or self.missing else source.convert(size, fields)
        return source(self, fields) if callable(source) else source

    def score(self) -> int:
        """The number of the layout's keys that the state_dict has."""
        keys = (size.key for source in self.layout.sizes.values() for size in _sizes(source))
        ends = {self.layout.embedding, self.layout.head} & self.weights.keys()
        return len(ends) + sum(self.find(key) is not None for key in keys)


def check_layout(name: str, layout: Any) -> None:
    """Raises an error if a layout or a `Size` in it has a value of the wrong type, or a key twice.

    Raises:
        TypeError: `layout` is not a `Layout`, or a value has the wrong type.
        ValueError: two of the keys of the embedding, the norm and the head are equal.

    """
    scope = Scope(SCALARS, {})
    scope.checked(name, layout, Layout)
    keys = (layout.embedding, layout.norm, *([] if layout.head is None else [layout.head]))
    checked_names(f"{name}: the keys of embedding, norm and head", keys)
    if not isinstance(layout.sizes, Mapping):
        got = described(layout.sizes)
        raise TypeError(f"{name}.sizes: expected a mapping of fields to their sources, got {got}")
    for field, source in layout.sizes.items():
        for size in _sizes(source):
            scope.checked(f"{name}.sizes[{field!r}]", size, Size)


def whole_key(layout: Layout, key: str, number: str = "0") -> str:
    """The full key of a `Size`, in the block with this number if the key belongs to a block."""
    return f"{layout.blocks}.{number}{key[1:]}" if key.startswith("*.") else key


def _sizes(source: Any) -> list[Size]:
    """The sizes of weights from which a field is read."""
    sources = source if isinstance(source, tuple) and not isinstance(source, Size) else (source,)
    return [each for each in sources if isinstance(each, Size)]


def has(key: str, there: Any = True, otherwise: Any = False) -> Callable[[Checkpoint, Fields], Any]:
    """A source for `Layout.sizes`: its value depends on whether the checkpoint has this key."""
    return lambda checkpoint, fields: there if checkpoint.find(key) is not None else otherwise


def tied_head(checkpoint: Checkpoint, fields: Fields) -> bool:
    """A source for `Layout.sizes`: whether the head equals the embedding, or there is no head."""
    layout, weights = checkpoint.layout, checkpoint.weights
    keys = (layout.head or layout.embedding, layout.embedding)
    head, embedding = (weights.get(key) for key in keys)
    if head is None or embedding is None:
        return True
    return np.array_equal(as_numpy(head), as_numpy(embedding))


class ModelConfig(CheckedFields):
    """The base class of the configs of models whose checkpoints `load_pretrained` reads."""

    family: ClassVar[str] = ""
    """The models' name in error messages. A class without a name is a base class of others."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in the config.json of such a model."""
    marks: ClassVar[tuple[str | Mark, ...]] = ()
    """What identifies a checkpoint if no config.json names the model. Each is a substring of some
    key, or a `Mark` that the keys fit, and one of them suffices. Without marks, a layout's
    embedding, last norm and required sizes identify it.
    """
    left_out: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the keys of parts that the model does not have, such as a vision tower.
    `load_pretrained` leaves them out, and a warning lists them.
    """
    float32_keys: ClassVar[tuple[str, ...]] = ()
    """Endings of the keys of weights that the model reads in at least float32. If a checkpoint has
    them in a wider dtype than all others, `load_pretrained` keeps both dtypes.
    """
    layouts: ClassVar[Mapping[str, Layout]] = {}
    """The keys of each layout. By default, `to_torch` writes the first that all blocks have."""

    def __init_subclass__(cls, **kwargs: Any):
        """Checks the marks and the layouts of the class."""
        super().__init_subclass__(**kwargs)
        check_marks(f"{cls.__name__}.marks", cls.marks)
        for name, layout in cls.layouts.items():
            check_layout(f"{cls.__name__}.layouts[{name!r}]", layout)

    def build(self, **options: Any) -> Any:
        """Builds the model of this config."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass builds the model")

    @classmethod
    def recognizes(cls, keys: Iterable[str]) -> bool:
        """Whether these are the keys of a model of this class."""
        weights = dict.fromkeys(keys)
        if cls.marks:
            marks = (Mark((each,)) if isinstance(each, str) else each for each in cls.marks)
            return any(mark.fits([*weights]) for mark in marks)
        checkpoints = [Checkpoint(weights, layout) for layout in cls.layouts.values()]
        return any(
            {each.layout.embedding, each.layout.norm} <= weights.keys()
            and each.numbers
            and all(each.find(s.key) for s in each.layout.sizes.values() if isinstance(s, Size))
            for each in checkpoints
        )

    @classmethod
    def confused_with(cls, keys: Iterable[object]) -> str | None:
        """Describes the similar model that has these keys, such as `RWKV-5 (it has …)`, or None."""
        return None

    @classmethod
    def foreign_format(cls, keys: Iterable[object]) -> str | None:
        """Returns the message of `from_torch` if the keys are those of a similar model, or None."""
        other = cls.confused_with(keys)
        return other and f"a checkpoint of {other}, this model is {cls.family}"

    @classmethod
    def layout_keys(cls) -> list[set[str]]:
        """For each layout, the keys of embedding and last norm, and of the sizes of block 0."""
        return [
            {
                layout.embedding,
                layout.norm,
                *(
                    whole_key(layout, size.key)
                    for source in layout.sizes.values()
                    for size in _sizes(source)
                ),
            }
            for layout in cls.layouts.values()
        ]

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """Returns the config of a checkpoint, which may come with the fields of a config.json.

        `options` are fields of the config that neither of the two contains.
        """
        return cls.from_state_dict(weights, **options)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """The config of a checkpoint in any of the model's layouts, read from keys and shapes.

        `layouts` defines how each field is read. A field that no shape determines has the value of
        the published models, unless `options` contains it.

        Raises:
            TypeError: the state_dict is not a mapping, or an option is not a field of the config.
            ValueError: the state_dict is not a checkpoint of such a model, or an option is wrong.
            NotImplementedError: no layout says how to read the fields of this config.

        """
        checked_mapping("state_dict", state_dict)
        if message := cls.foreign_format(state_dict):
            raise ValueError(f"state_dict: {message}")
        options = cls.checked_fields(options)
        # Without sizes, fields would silently keep their defaults, whatever the weights are.
        config: Any = cls  # a dataclass, as every subclass is
        needed = {field.name for field in dataclasses.fields(config) if not field.kw_only}
        known = {"vocab_size", "features", "num_layers", *options}
        if needed - known and not any(layout.sizes for layout in cls.layouts.values()):
            raise NotImplementedError(
                f"{cls.__name__}: no layout says how to read its fields from a checkpoint; build "
                "the config yourself"
            )
        # A checkpoint does not name its layout, so take the one with the most keys in the
        # state_dict.
        candidates = (Checkpoint(state_dict, layout) for layout in cls.layouts.values())
        checkpoint = max(candidates, key=Checkpoint.score)
        layout, numbers = checkpoint.layout, checkpoint.numbers
        if "num_layers" not in layout.sizes and numbers != [str(i) for i in range(len(numbers))]:
            found = ", ".join(joined(f"{layout.blocks}.{number}" for number in numbers))
            raise ValueError(f"state_dict: expected blocks numbered 0, 1, 2, …, got {found}")
        fields: dict[str, Any] = {
            "vocab_size": checkpoint.size(layout.embedding, 0, 2),
            "features": checkpoint.size(layout.embedding, 1, 2),
            "num_layers": len(numbers),
            **options,
        }
        for name, source in layout.sizes.items():
            if name in options or (value := checkpoint.field(source, fields)) is ...:
                continue
            if value is UNDETERMINED and not checkpoint.missing:
                folder = ", or load the folder with the config.json" if cls.model_types else ""
                raise ValueError(f"{name}: no shape determines it; pass {name}=…{folder}")
            fields[name] = value
        if checkpoint.missing:
            names = " and no ".join(joined(dict.fromkeys(checkpoint.missing)))
            lacks = f"not a checkpoint of {cls.family}: it has no {names}"
            raise ValueError(f"state_dict: {locate_keys(state_dict, cls.layout_keys()) or lacks}")
        # Drop a field that the config does not have: a recurrent model has no `features` of its
        # own.
        known = {*options, *cls.field_types()}
        return cls(**{name: value for name, value in fields.items() if name in known})


Config = TypeVar("Config", bound=ModelConfig)


@functools.cache
def _all_architectures() -> tuple[type[ModelConfig], ...]:
    package = importlib.import_module("jax_models.models")
    found = by_name(
        "config",
        (
            (value.__name__, value, f"{value.__module__}.{value.__qualname__}")
            for module in modules_of(package, ENTRY_POINTS)
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, ModelConfig)
            and value.__module__ == module.__name__
            and value.family
        ),
    )
    return tuple(found.values())


def architectures(kind: type[Config] = ModelConfig) -> list[type[Config]]:
    """The config classes of all architectures in this package and in others.

    Other packages register the modules of their models in the entry point group `twinscan.models`.
    """
    return [config for config in _all_architectures() if issubclass(config, kind)]
