"""The configuration of a run, its presets, and its file."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast

import tyro

from jax_models import LanguageModelConfig, RNNLanguageModelConfig
from jax_models.entry_points import broken_packages, by_name, failures_as_warnings
from jax_models.models.architecture import ENTRY_POINTS, architectures
from jax_models.options import CheckedFields
from train.checks import Paths, Positive, Seed, Texts
from train.trainer.mesh import MeshConfig
from train.trainer.optimizer import OptimizerConfig

MODEL_CONFIGS = {config.__name__: config for config in architectures(LanguageModelConfig)}
"""The language models, by the name in a run's config.json."""
ModelConfig = Union[tuple(MODEL_CONFIGS.values())]  # noqa: UP007


def changes(before: Any, config: Any, path: str = "") -> dict[str, str]:
    """The changes between two configs, by the path of the field: `0.001 → 0.0003`."""
    found = {}
    for field in dataclasses.fields(config):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if dataclasses.is_dataclass(old) and type(old) is type(new):
            found |= changes(old, new, f"{path}{field.name}.")
        elif old != new:
            found[f"{path}{field.name}"] = f"{old} → {new}"
    return found


@dataclasses.dataclass(frozen=True)
class TrainConfig(CheckedFields):
    """The options of a run, which trains a language model on a text."""

    model: Annotated[LanguageModelConfig, tyro.conf.arg(constructor=cast(Any, ModelConfig))] = (
        RNNLanguageModelConfig(context_length=8)
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    init: Path | None = None
    """Where the initial weights come from. The folder of a run also gives the defaults of the
    options and the vocabulary; a checkpoint (a file or folder, as `generate --weights` takes it)
    gives the defaults of the model and the tokenizer. None: random weights."""
    freeze: Texts = ()
    """Regular expressions. The parameters whose path, such as blocks.0.mlp.up_proj.kernel, contains
    a match keep their initial values: embedding matches all embeddings, and ^(?!head) matches all
    parameters except the head."""
    text: Paths = ()
    """UTF-8 files, or folders of them. Each file is a document, and so is the "text" of each line
    of a .jsonl file. None: the sentence "All work and no play makes Jack a doll boy." ten times."""
    separator: str | None = None
    """The string that separates documents inside a file, such as <|endoftext|>."""
    tokenizer: str = "characters"
    """How to tokenize the text: characters, bytes, the path of a tokenizer.json (of the package
    tokenizers), world (RWKV's vocabulary) or nucleotides (HyenaDNA's)."""
    end_of_text: str | None = None
    """The token that ends a document. By default, a common one that the tokenizer has."""
    val_rows: int | None = None
    """Number of rows of `window` tokens to validate on, drawn at random from the whole text; the
    other rows are trained on, each once an epoch. None: validate on the last tenth of the text, and
    train on all windows of the other nine tenths."""
    num_steps: int = 2000
    """Number of optimizer steps."""
    num_epochs: Positive | None = None
    """Number of passes over the training part, instead of num_steps."""
    batch_size: int = 4
    """Number of windows in a step, over all devices."""
    accumulate: int = 1
    """Compute the gradient of a batch in this many parts, one after the other, to save memory."""
    window: int = 8
    """Number of tokens in a window."""
    eval_every: int = 100
    """Number of steps between evaluations. Each of them writes a checkpoint. If they are rare,
    others are written about every half minute."""
    eval_batches: int = 200
    """Number of random batches of each part (training, validation) in an evaluation."""
    log_every: int = 100
    """Number of steps between lines with the loss, the learning rate and the speed. In a short run,
    lines come more often, so that there are at least ten."""
    tensorboard: bool = False
    """Also log for TensorBoard, into the run's folder (needs the package tensorboardX)."""
    max_skipped: int = 10
    """Stop after this many consecutive steps whose loss or gradient is not finite. Such steps are
    not applied."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the computation. The parameters are always float32."""
    seed: Seed = 2001
    """The random seed of the weights, the batches and the dropout masks."""

    def __post_init__(self):
        """Checks each field, and fields that depend on each other."""
        super().__post_init__()
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: expected a divisor of the batch_size {self.batch_size}, "
                f"got {self.accumulate}"
            )
        limit = getattr(self.model, "context_length", None)
        if limit is not None and self.window > limit:
            raise ValueError(
                f"window: expected at most the model's context_length {limit}, got {self.window}"
            )

    def with_steps(self, train_rows: int) -> "TrainConfig":
        """Replaces `num_epochs` by `num_steps`, for a training part with this number of rows."""
        if self.num_epochs is None:
            return self
        num_steps = math.ceil(self.num_epochs * train_rows / self.batch_size)
        return dataclasses.replace(self, num_steps=num_steps, num_epochs=None)


def with_options(config: Any, options: Mapping[str, Any]) -> Any:
    """The config with other values for some fields, named as on the command line.

    Raises:
        TypeError: a field does not exist.

    """
    for name, value in options.items():
        outer, _, inner = name.partition(".")
        if inner:
            value = with_options(getattr(config, outer), {inner: value})
        config = dataclasses.replace(config, **{outer: value})
    return config


_SHAKESPEARE = {
    "optimizer.learning_rate": 4e-3,
    "optimizer.schedule": "cosine",
    "num_steps": 1000,
    "batch_size": 32,
    "window": 128,
    "eval_every": 200,
    "eval_batches": 20,
}
_WARMUP = _SHAKESPEARE | {"optimizer.warmup_steps": 40, "num_steps": 600}
_ANNOTATED_HYENA = {
    "optimizer.betas": (0.9, 0.98),
    "optimizer.clip_norm": 0.2,
    "num_epochs": 40.0,
    "val_rows": 3200,
    "batch_size": 64,
    "window": 128,
    "eval_every": 100,
    "eval_batches": 50,
    "dtype": "bfloat16",
}
RECIPES: dict[str, dict[str, Any]] = {
    "all-work": {},
    "shakespeare": _SHAKESPEARE,
    "shakespeare-warmup": _WARMUP,
    "shakespeare-small-batches": _WARMUP
    | {
        "optimizer.learning_rate": 2e-3,
        "optimizer.betas": (0.9, 0.99),
        "num_steps": 2300,
        "batch_size": 8,
        "eval_every": 460,
    },
    "annotated-hyena": _ANNOTATED_HYENA,
    "annotated-hyena-small": _ANNOTATED_HYENA  # two cores finish it in ten minutes
    | {
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 40,
        "num_epochs": 3.0,
        "batch_size": 32,
        "eval_every": 200,
        "eval_batches": 20,
        "dtype": "float32",
    },
}
"""The options of a run, apart from its model, that several presets have in common."""


def config_of_preset(model: type[LanguageModelConfig], options: Mapping[str, Any]) -> TrainConfig:
    """The config of a run with these options, which `LanguageModelConfig.presets` explains.

    Raises:
        TypeError: an option does not exist.
        ValueError: a value is wrong, or the recipe does not exist.

    """
    recipe = options.get("recipe", "shakespeare-warmup")
    if recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe}")
    # The model is built at once, because other fields may depend on those that are given.
    fields, others = {}, dict(RECIPES[recipe])
    for name, value in options.items():
        if name.startswith("model."):
            fields[name.removeprefix("model.")] = value
        elif name != "recipe":
            others[name] = value
    return with_options(TrainConfig(model(**fields)), others)


def declared_presets() -> Iterator[tuple[str, TrainConfig, str]]:
    """Each preset of each architecture, with its name and the class that declares it.

    Inherited presets do not count, because they are those of another architecture.
    """
    for config in MODEL_CONFIGS.values():
        declared = vars(config).get("presets", {})
        package, presets = config.__module__.partition(".")[0], {}
        is_ours = package == LanguageModelConfig.__module__.partition(".")[0]
        with contextlib.nullcontext() if is_ours else failures_as_warnings(ENTRY_POINTS, package):
            if not isinstance(declared, Mapping):
                raise TypeError(
                    f"{config.__name__}.presets: expected a mapping of names to options, such as "
                    '{"small": {"model.num_layers": 2}}, got a '
                    f"{type(declared).__name__}"
                )
            for name, options in declared.items():
                presets[name] = config_of_preset(config, options)
        for name, preset in presets.items():
            yield name, preset, f"{config.__module__}.{config.__qualname__}"


PRESETS = by_name("preset", declared_presets())
"""The presets that the config classes of the architectures declare."""


class UnknownModelError(ValueError):
    """The model of a config is not among the installed ones."""


def to_fields(config: TrainConfig) -> dict[str, Any]:
    """The config as a JSON object, which `from_fields` reads."""
    fields = dataclasses.asdict(config)
    fields["model"] = {"type": type(config.model).__name__, **fields["model"]}
    return json.loads(json.dumps(fields, default=str))


def from_fields(fields: dict[str, Any]) -> TrainConfig:
    """The config that `to_fields` wrote.

    Raises:
        UnknownModelError: no installed package declares the model.
        KeyError, TypeError, ValueError: the fields are not those of a config.

    """
    model = dict(fields["model"])
    if (name := model.pop("type")) not in MODEL_CONFIGS:
        broken = broken_packages(ENTRY_POINTS)
        raise UnknownModelError(
            f"model: expected one of {', '.join(MODEL_CONFIGS)}, got {name}; "
            f"install the package that declares it{broken}"
        )
    kind = MODEL_CONFIGS[name]
    return TrainConfig(
        **fields
        | {
            "model": kind(**{**kind.unsaved_values, **model}),
            "optimizer": OptimizerConfig(**fields["optimizer"]),
            "mesh": MeshConfig(**fields.get("mesh", {})),
        }
    )
