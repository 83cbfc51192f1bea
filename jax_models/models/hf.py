"""Reads and writes the config.json of transformers' models, by tables in the config classes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from jax_models.models.architecture import Checkpoint, architectures
from jax_models.models.configs import BlocksConfig

ROTARY = ("rope_theta", "partial_rotary_factor")
"""The fields that are in `rope_parameters`, or in older files at the top level."""
UNSUPPORTED = {
    "quantization_config": "quantized weights",
    "num_experts": "mixtures of experts",
    "num_local_experts": "mixtures of experts",
}
"""The fields of parts that a model does not have, unless its `HFModel.fields` contain them."""


class HFModel(NamedTuple):
    """A model of transformers and the fields of its config.json."""

    model_type: str
    """The `model_type` of the config.json."""
    hf_class: str
    """The class of the model in transformers."""
    fields: Mapping[str, str]
    """As `HFConfig.hf_fields`."""
    sizes: tuple[str, ...]
    """As `HFConfig.hf_sizes`."""
    defaults: Mapping[str, Any] = {}
    """As `HFConfig.hf_defaults`."""


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that, repeated, begins with these kinds of blocks."""
    lengths = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
    return tuple(kinds[: next(lengths, len(kinds))])


def kinds_by_key(checkpoint: Checkpoint, key: str, kind: str, other: str) -> tuple[str, ...]:
    """The pattern of the blocks' kinds: this kind if a block has this key, otherwise the other."""
    return shortest_pattern([kind if there else other for there in checkpoint.in_blocks(key)])


class HFConfig(BlocksConfig):
    """The base class of configs that a config.json of transformers determines."""

    hf_class: ClassVar[str]
    """The class of the model in transformers."""
    hf_fields: ClassVar[dict[str, str]]
    """Maps fields of a config.json to the fields of our config that have the same value."""
    hf_aliases: ClassVar[Mapping[str, str]] = {}
    """Maps other names of fields of a config.json to those that are read, unless they are null."""
    hf_sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
    )
    """The fields that a config.json must have."""
    hf_values: ClassVar[Mapping[str, tuple[Any, ...]]]
    """The values that fields of a config.json can have, the default first."""
    hf_defaults: ClassVar[Mapping[str, Any]] = {}
    """transformers' defaults for other fields. The defaults that are not listed equal ours."""
    hf_experts: ClassVar[HFModel | None] = None
    """The model with a mixture of experts, if it has another class in transformers."""

    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published models whose sizes `benchmarks.full_size` and `tpu_compile` use: for each name, the
    fields of the config.
    """

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """Reads the config.json if there is one, because weights do not determine all fields."""
        if fields is None:
            return cls.from_state_dict(weights, **options)
        return dataclasses.replace(cls.from_hf(fields), **options)

    @classmethod
    def hf_model(cls, has_experts: bool) -> HFModel:
        """Returns the model of transformers without or with experts."""
        if has_experts and cls.hf_experts is not None:
            return cls.hf_experts
        own = cls.hf_fields, cls.hf_sizes, cls.hf_defaults
        return HFModel(cls.model_types[0], cls.hf_class, *own)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config from the config.json of a model of transformers.

        Raises:
            ValueError: the config.json is of another model, has an option that this model does not
                support, or lacks a size.

        """
        aliases = {ours: config.get(other) for other, ours in cls.hf_aliases.items()}
        config = {name: value for name, value in config.items() if name not in cls.hf_aliases}
        config |= {name: value for name, value in aliases.items() if value is not None}
        stated = {name: value for name, value in config.items() if value is not None}
        other = cls.hf_experts
        model = cls.hf_model(other is not None and stated.get("model_type") == other.model_type)
        rotary = stated.get("rope_scaling") or stated.get("rope_parameters", {})
        if not isinstance(rotary, Mapping) or any(isinstance(v, Mapping) for v in rotary.values()):
            raise ValueError(
                "config: rope_parameters: expected one set of parameters for all layers, got "
                f"{rotary!r}"
            )
        # Settings that are left out take the defaults of transformers. The rotary settings are
        # nested, so they are merged last.
        defaults = {name: value for name, (value, *_) in cls.hf_values.items()}
        given: dict[str, Any] = {
            **{name: value for name, value in defaults.items() if name != "model_type"},
            **model.defaults,
            **stated,
            **({"rope_type": rotary["type"]} if "type" in rotary else {}),
            **{name: value for name, value in rotary.items() if value is not None},
        }
        # Refuse whatever the model does not compute, because it would give other results without a
        # message.
        for name, values in {"model_type": cls.model_types, **cls.hf_values}.items():
            if (value := given.get(name)) not in values:
                known = " or ".join(map(str, values))
                raise ValueError(f"config: {name}: expected {known}, got {value}")
        for name, part in UNSUPPORTED.items():
            if name not in model.fields and (value := stated.get(name)):
                value = value.get("quant_method") if isinstance(value, Mapping) else value
                place = cls.family if cls.hf_experts is None else given["model_type"]
                raise ValueError(
                    f"config: {name}: expected none, because {part} are not supported in {place}, "
                    f"got {value}"
                )
        # Sizes must be stated, because any default would be a guess.
        for name in model.sizes:
            if not isinstance(value := stated.get(name), int):
                raise ValueError(f"config: {name}: expected an integer, got {value!r}")
        # Rename the fields, and convert those that have another meaning here.
        fields = {ours: given[name] for name, ours in model.fields.items() if name in given}
        return cls(**fields | cls.converted(given, config))

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of our config that do not equal one field of the config.json.

        `given` has the defaults, and `config` has only what the file states, including null.
        """
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json of the equivalent model in transformers.

        Raises:
            ValueError: transformers does not support an option of this config.

        """
        model = self.hf_model(getattr(self, "num_experts", 0) > 0)
        fields = {name: getattr(self, ours) for name, ours in model.fields.items()}
        rotary = {name: fields[name] for name in ROTARY if name in fields}
        return {
            "architectures": [model.hf_class],
            "model_type": model.model_type,
            **{
                name: [*value] if isinstance(value, tuple) else value
                for name, value in fields.items()
                if value is not None
            },
            "rope_parameters": {"rope_type": "default", **rotary},
        }

    def expansion(self, *names: str) -> int:
        """The product of these fields divided by `features`, as a config.json states it.

        Raises:
            ValueError: it is not an integer, which transformers expects.

        """
        inner = math.prod(getattr(self, name) for name in names)
        factor, rest = divmod(inner, self.features)
        if rest:
            expected = f"{' · '.join(names)} to be " if names[1:] else ""
            raise ValueError(
                f"{names[0]}: expected {expected}a multiple of features = {self.features}, as in "
                f"transformers, got {inner}"
            )
        return factor


class PatternConfig(HFConfig):
    """The base class of configs whose blocks are of several kinds, in a pattern that repeats."""

    kinds: ClassVar[tuple[str, ...]]
    """The kinds of blocks."""

    block_types: tuple[Any, ...]

    def __post_init__(self):
        super().__post_init__()
        types = tuple(self.block_types) if isinstance(self.block_types, list | tuple) else ()
        if not types or not all(kind in self.kinds for kind in types):
            raise ValueError(
                f"block_types: expected some of {self.kinds}, got {self.block_types!r}"
            )
        object.__setattr__(self, "block_types", types)

    @property
    def mixings(self) -> list[Any]:
        """The kind of each block, from the lowest up."""
        kinds = self.block_types
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]


def published_models(**options: Any) -> dict[str, HFConfig]:
    """The configs of the published models that the config classes declare, by name.

    `options` are other fields of all these configs.
    """
    return {
        name: config(**fields, **options)
        for config in architectures(HFConfig)
        for name, fields in config.published.items()
    }
