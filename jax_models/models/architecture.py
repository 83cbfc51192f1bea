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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from jax_models.checks.arguments import Scope
from jax_models.checks.removed import refusing
from jax_models.checks.values import SCALARS
from jax_models.entry_points import by_name, modules_of
from jax_models.options import CheckedFields
from jax_models.weights.arguments import checked_names
from jax_models.weights.keys import checked_mapping, flattened, joined
from jax_models.weights.places import locate_keys
from jax_models.weights.rows import Weight
from jax_models.weights.stored import as_numpy

ENTRY_POINTS = "twinscan.models"
"""The entry point group in which other packages name the modules of their models."""

Fields = Mapping[str, Any]


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
    """If the head is tied: whether `to_torch` writes the embedding again under the head's key, and
    the weights of a layer that several blocks share under the keys of each of these blocks. Import
    reads checkpoints with and without these keys.
    """
    positions: Weight | None = None
    """The row of the position embedding."""
    blocks_layout: str | None = None
    """The name of the blocks' layout. None: the same name as this layout."""
    sizes: "Callable[[Checkpoint], Fields] | None" = None
    """The function that reads the fields of the config from a `Checkpoint`. A field that it does
    not return keeps its default. `vocab_size` and `features` are the sizes of the embedding, and
    `num_layers` is the number of the blocks, unless the function returns them, too.
    """


class MissingWeightError(ValueError):
    """The checkpoint lacks weights with these keys, from which fields of the config are read."""


class UndeterminedFieldError(ValueError):
    """The user has not passed the field with this name, which no shape determines."""


PLACEHOLDER = 1
"""The size of a weight that is missing or has a wrong shape. Reading goes on, so that the error
names all that are missing, and the layout with the most keys is found."""


class Checkpoint:
    """The weights of a model in one layout, from which `Layout.sizes` reads a config's fields.

        def sizes(checkpoint):
            return {
                "units": checkpoint.size("*.esn.recurrent.weight", 0),
                "use_bias": checkpoint.has("*.esn.recurrent.bias"),
            }

    In a key that begins with `*.`, the `*` stands for the prefix of the blocks and the number of
    the lowest block that has such a weight: `*.esn.leak` for `blocks.0.esn.leak`. Any other key is
    a full key.

    Args:
        state_dict: the weights by key.
        layout: the layout whose fields are read.
        options: the fields of the config that the user has passed.

    """

    def __init__(
        self, state_dict: Mapping[str, Any], layout: Layout, options: Fields = MappingProxyType({})
    ):
        self.weights = {str(key): value for key, value in state_dict.items()}
        self.layout, self.options = layout, options
        self.found = {layout.embedding, layout.head} & self.weights.keys()
        """The keys that were looked up and exist."""
        self.missing: list[str] = []
        """The keys that were looked up, must exist, and do not."""
        self.undetermined: list[str] = []
        """The names of the fields that the user must pass."""
        self.misshapen: list[str] = []
        """Messages about weights of the wrong shape."""

    @functools.cached_property
    def numbers(self) -> list[str]:
        """The numbers of the blocks, which follow the prefix of the blocks in the keys."""
        prefix = f"{self.layout.blocks}."
        found = {
            key.removeprefix(prefix).split(".")[0] for key in self.weights if key.startswith(prefix)
        }
        return sorted(found, key=lambda number: (len(number), number))

    @property
    def features(self) -> int:
        """The width of the embedding."""
        return self.size(self.layout.embedding, 1, rank=2)

    @property
    def tied_head(self) -> bool:
        """Whether the head equals the embedding, or there is no head, unless the user says so."""
        if "tied_head" in self.options:
            return self.options["tied_head"]
        keys = (self.layout.head or self.layout.embedding, self.layout.embedding)
        head, embedding = (self.weights.get(key) for key in keys)
        if head is None or embedding is None:
            return True
        return np.array_equal(as_numpy(head), as_numpy(embedding))

    def size(self, key: str, axis: int, *, rank: int | None = None) -> int:
        """The size of an axis of a weight.

        Args:
            key: the key of the weight, which the checkpoint must have.
            axis: the axis. Negative: counted from the last.
            rank: the number of axes that the weight must have. None: any number.

        """
        if (name := self._required(key)) is None:
            return PLACEHOLDER
        shape = tuple(getattr(self.weights[name], "shape", ()))
        if not -len(shape) <= axis < len(shape) or rank not in (None, len(shape)) or 0 in shape:
            expected = f"{rank} axes" if rank is not None else f"an axis {axis}"
            hint = "; to read the value of a scalar, call `value`" if not shape else ""
            self.misshapen.append(f"{name}: expected {expected}, none empty, got {shape}{hint}")
            return PLACEHOLDER
        return int(shape[axis])

    def value(self, key: str) -> Any:
        """The value of a weight without axes, which the checkpoint must have."""
        if (name := self._required(key)) is None:
            return PLACEHOLDER
        if shape := tuple(getattr(self.weights[name], "shape", ())):
            self.misshapen.append(
                f"{name}: expected a scalar, got shape {shape}; to read the size of an axis, call "
                "`size`"
            )
            return PLACEHOLDER
        return as_numpy(self.weights[name]).item()

    def has(self, key: str) -> bool:
        """Whether the checkpoint has a weight."""
        return self._find(key) is not None

    def first(self, *keys: str) -> str:
        """The first of these keys that the checkpoint has, or else the last of them."""
        return next((key for key in keys if self.has(key)), keys[-1])

    def in_blocks(self, key: str) -> list[bool]:
        """For each block, from the lowest up, whether it has a weight, as in `*.esn.leak`."""
        return [self._in_block(number, key) in self.weights for number in self.numbers]

    def given(self, name: str, default: Any = ...) -> Any:
        """The value that the user has passed for a field, because no shape determines it.

        Args:
            name: the name of the field.
            default: the value if the user has not passed any. By default, that is an error.

        """
        if (value := self.options.get(name, default)) is ...:
            self.undetermined.append(name)
            return PLACEHOLDER
        return value

    def _required(self, key: str) -> str | None:
        if (found := self._find(key)) is None:
            self.missing.append(self._in_block("*", key))
        return found

    def _find(self, key: str) -> str | None:
        """The full key of a weight, in the lowest block that has it, or None if no block has it."""
        numbers = self.numbers if key.startswith("*.") else ["0"]
        keys = (self._in_block(number, key) for number in numbers)
        found = next((key for key in keys if key in self.weights), None)
        self.found |= {found} - {None}
        return found

    def _in_block(self, number: str, key: str) -> str:
        return f"{self.layout.blocks}.{number}{key[1:]}" if key.startswith("*.") else key

    def fields(self) -> Fields:
        """The fields of the config. Those that the user has passed may have any value.

        Raises:
            MissingWeightError: the checkpoint lacks weights.
            UndeterminedFieldError: the user must pass a field.
            ValueError: a weight has the wrong shape, or the blocks are not numbered 0, 1, 2, ….

        """
        if isinstance(self._contents, Exception):
            raise self._contents
        return self._contents

    @functools.cached_property
    def _contents(self) -> Fields | Exception:
        """The fields, or the error that explains why they cannot be read."""
        try:
            fields = self._read()
        except Exception as error:  # `sizes` also runs for checkpoints of other models
            fields = error
        # A placeholder may cause other errors, so the reason for it comes first. Passing a field
        # does not help if the weights are wrong.
        if self.missing:
            return MissingWeightError(" and no ".join(dict.fromkeys(self.missing)))
        if self.misshapen:
            return ValueError(f"state_dict: {self.misshapen[0]}")
        if self.undetermined and not isinstance(fields, ValueError):
            return UndeterminedFieldError(self.undetermined[0])
        return fields

    def _read(self) -> Fields:
        sizes, prefix = self.layout.sizes, f"{self.layout.blocks}."
        found = {
            "vocab_size": self.size(self.layout.embedding, 0, rank=2),
            "features": self.features,
            **({} if sizes is None else sizes(self)),
        }
        if "num_layers" in found:
            return found
        if self.numbers != [str(i) for i in range(len(self.numbers))]:
            names = ", ".join(joined(prefix + number for number in self.numbers))
            raise ValueError(f"state_dict: expected blocks numbered 0, 1, 2, …, got {names}")
        return {**found, "num_layers": len(self.numbers)}

    def score(self) -> int:
        """The number of keys that reading the fields looks up and finds."""
        _ = self._contents
        return len(self.found)

    def is_complete(self) -> bool:
        """Whether the checkpoint has blocks, a last norm and each weight that it needs."""
        lacks_weights = isinstance(self._contents, MissingWeightError)
        return self.layout.norm in self.weights and bool(self.numbers) and not lacks_weights


def check_layout(name: str, layout: Any) -> None:
    """Raises an error if a layout has a value of the wrong type, or a key twice.

    Raises:
        TypeError: `layout` is not a `Layout`, or a value has the wrong type.
        ValueError: two of the keys of the embedding, the norm and the head are equal.

    """
    Scope(SCALARS, {}).checked(name, layout, Layout)
    keys = (layout.embedding, layout.norm, *([] if layout.head is None else [layout.head]))
    checked_names(f"{name}: the keys of embedding, norm and head", keys)


class ModelConfig(CheckedFields):
    """The base class of the configs of models whose checkpoints `load_pretrained` reads."""

    family: ClassVar[str] = ""
    """The models' name in error messages. A class without a name is a base class of others."""
    model_types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in the config.json of such a model."""
    marks: ClassVar[tuple[str | Mark, ...]] = ()
    """What identifies a checkpoint if no config.json names the model. Each is a substring of some
    key, or a `Mark` that the keys fit, and one of them suffices. Without marks, a layout's
    embedding and last norm and the weights that `sizes` reads identify it.
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
    def recognizes(cls, weights: Mapping[str, Any]) -> bool:
        """Whether these are the weights of a model of this class."""
        if cls.marks:
            marks = (Mark((each,)) if isinstance(each, str) else each for each in cls.marks)
            return any(mark.fits([*weights]) for mark in marks)
        return any(Checkpoint(weights, each).is_complete() for each in cls.layouts.values())

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
    def locate(cls, weights: Mapping[str, Any]) -> str | None:
        """Says in which entry, or under which prefix, weights of such a model are, or None."""
        flat, layouts = flattened(weights), cls.layouts.values()
        keys = [{each.embedding, each.norm, each.head or each.norm} for each in layouts]
        ends = {f".{layout.embedding}" for layout in layouts}
        for start in {key.removesuffix(end) for key in flat for end in ends if key.endswith(end)}:
            prefix = f"{start}."
            inside = {k.removeprefix(prefix): w for k, w in flat.items() if k.startswith(prefix)}
            if cls.recognizes(inside):
                return locate_keys(weights, keys)
        return None

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
        # Without `sizes`, fields would silently keep their defaults, whatever the weights are.
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
        checkpoints = (Checkpoint(state_dict, each, options) for each in cls.layouts.values())
        try:
            fields = max(checkpoints, key=Checkpoint.score).fields()
        except MissingWeightError as error:
            lacks = f"not a checkpoint of {cls.family}: it has no {error}"
            raise ValueError(f"state_dict: {cls.locate(state_dict) or lacks}") from None
        except UndeterminedFieldError as error:
            folder = ", or load the folder with the config.json" if cls.model_types else ""
            message = f"{error}: no shape determines it; pass {error}=…{folder}"
            raise ValueError(message) from None
        # Drop a field that the config does not have: a recurrent model has no `features` of its
        # own.
        known = cls.field_types()
        return cls(**{name: value for name, value in fields.items() if name in known} | options)


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


_REMOVED = {
    name: "`sizes` of a `Layout` is now a function of a `Checkpoint`"
    for name in ("Size", "UNDETERMINED", "has", "tied_head")
}
"""What to do instead of importing names that this module had."""

if not TYPE_CHECKING:
    __getattr__ = refusing(__name__, _REMOVED)
