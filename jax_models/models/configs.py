"""The base classes of the configs of language models."""

__all__ = ["LanguageModelConfig"]

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, Unpack

from jax_models.layers.stack import Remat
from jax_models.models.architecture import ModelConfig
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer

Layer = TypeVar("Layer", bound=SequenceLayer)


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """The base class of the configs of all language models. All integer fields are positive."""

    tokenizer: ClassVar[str | None] = None
    """The name of the published vocabulary, if all models of the class have the same."""
    twin: ClassVar[str] = "torch_ref"
    """The module with the PyTorch twin, a class with the model's name and a `from_config`."""
    unsaved_values: ClassVar[Mapping[str, Any]] = {}
    """The values of fields that are missing in the config.json of a run of an earlier version, if
    that version had other defaults.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The runs that `twinscan train --preset` offers for this architecture, by name. Each is given
    by the options whose values differ from those of a recipe, named as on the command line:
    `{"hawk": {"model.num_layers": 2, "optimizer.learning_rate": 1e-3}}`. The option `recipe` names
    the recipe. Subclasses do not inherit presets.
    """

    vocab_size: int
    """Number of distinct tokens."""

    def build(self, **options: Unpack[NormOptions]) -> Any:
        """Builds the model of this config, a `LanguageModel`."""
        return super().build(**options)

    def make(self, layer: Callable[..., Layer], **others: Any) -> Layer:
        """Builds a layer.

        Arguments that have the name of a config field receive the value of the field. `others` are
        passed on and take precedence.
        """
        names = inspect.signature(layer).parameters
        fields = [field.name for field in dataclasses.fields(self) if field.name in names]
        return layer(**{name: getattr(self, name) for name in fields} | others)


@dataclasses.dataclass(frozen=True)
class StackConfig(LanguageModelConfig):
    """The base class of the configs of language models whose blocks have equal sizes."""

    remat: Remat = dataclasses.field(default="none", kw_only=True)
    """The part that the backward pass recomputes to save memory. "none": nothing. "dots":
    everything except the results of matrix products. "full": everything except the inputs of the
    blocks.
    """
    scan_layers: bool = dataclasses.field(default=False, kw_only=True)
    """Whether to compile one block and reuse it for all. On a CPU, this compiles large blocks
    faster, but runs slower.
    """


@dataclasses.dataclass(frozen=True)
class BlocksConfig(StackConfig):
    """The base class of the configs of models of residual blocks, with the sizes that all have."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Number of residual blocks."""
