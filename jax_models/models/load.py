"""Loads pretrained models of any architecture from a file, a folder, or weights in memory."""

__all__ = ["from_weights", "load_pretrained"]

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jax_models.entry_points import broken_packages
from jax_models.models.architecture import ENTRY_POINTS, ModelConfig, architectures
from jax_models.models.hf import HFConfig
from jax_models.models.language_model import LanguageModel
from jax_models.models.silero_vad import SileroVAD
from jax_models.options import FloatingDtype, checked_options
from jax_models.weights import from_torch
from jax_models.weights.checkpoint import open_checkpoint
from jax_models.weights.keys import checked_mapping, flattened, joined
from jax_models.weights.layouts import WEIGHTS, params_of, weight_table
from jax_models.weights.stored import cast, dtype_of, is_floating
from jax_models.weights.wrappers import find_wrapped

ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""Maps the path and the shape of a parameter to its sharding."""


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "features",
    "num_hidden_layers": "num_layers",
    "d_model": "features",
    "n_layer": "num_layers",
}
"""The names of sizes in a config.json, and the corresponding fields of our configs."""


@checked_options
def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype | None = None,
    sharding: ShardingOf | None = None,
    **config: Any,
) -> LanguageModel | SileroVAD:
    """Loads a pretrained model, with its weights, from a file or a folder.

        >>> from safetensors.numpy import save_file
        >>> config = RWKV7LanguageModelConfig(features=64, num_layers=1)
        >>> save_file(to_torch(config.build(rngs=nnx.Rngs(0))), "model.safetensors")
        >>> model = load_pretrained("model.safetensors")

    It reads the models that docs/architectures.md lists, in the files of transformers and of their
    authors; the files that `twinscan export` writes (pass the options that no shape determines,
    such as Griffin's `window`); and the models that other packages declare. The weights may be
    files of safetensors or `torch.save`, either whole or in shards that an index file lists, or an
    orbax folder. Keys, shapes and the config.json identify the model. No weights are initialized at
    random. Each weight is read when its parameter is created, so loading needs little more memory
    than the model itself.

    Args:
        path: the checkpoint file, or the folder that contains it.
        dtype: dtype of the computation. None: the dtype of the parameters, except that parameters
            in float16 are computed in float32, because RWKV-4 overflows in float16.
        param_dtype: dtype of the parameters. None: the widest dtype in the file, except that a few
            weights of some models, such as the decays of a Mamba or a Gated DeltaNet, keep a wider
            dtype of their own. A narrower dtype rounds the weights.
        sharding: a function that maps the path and the shape of a parameter to its sharding, such
            as `lambda path, shape: NamedSharding(mesh, spec)`. None: as in `from_torch`. A
            process reads only the experts that its devices hold, except from orbax.
        **config: fields of the model's config that the file does not contain, such as hippogriff's
            `window` or safari's `activation`.

    Raises:
        ImportError: a package that the file needs is not installed.
        TypeError: `path` is not a path, or the model's config has no such field.
        OSError: a file is missing or cannot be opened.
        ValueError: a file is damaged or holds another model, or keys, shapes and the config.json
            contradict each other.

    Warns:
        UserWarning: weights of parts that the model does not have, such as a vision tower, are
            left out.

    """
    weights, fields = open_checkpoint(path)
    known = config_of(weights, fields, **config)
    weights = without_other_parts(known, weights)
    return loaded(known, weights, dtype=dtype, param_dtype=param_dtype, sharding=sharding)


def _widest(weights: Iterable[Any]) -> Any:
    """The dtype that holds all floating weights exactly; float32 if there are none."""
    dtypes = {dtype_of(each) for each in weights if is_floating(each)}
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes) if dtypes else jnp.float32


def without_other_parts(config: ModelConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the weights of parts that the model does not have, with a warning.

    Raises:
        ValueError: all weights are of such parts.

    """
    counts = {start: sum(key.startswith(start) for key in weights) for start in config.left_out}
    listed = ", ".join(f"{start}* ({count} weights)" for start, count in counts.items() if count)
    if listed and sum(counts.values()) == len(weights):
        raise ValueError(f"state_dict: expected a {config.family}, got only {listed}")
    if listed:
        warnings.warn(f"{config.family}: left out {listed}", stacklevel=4)
    return {key: w for key, w in weights.items() if not key.startswith(config.left_out)}


def config_of(
    weights: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Returns the config of the model that has these weights and these fields of a config.json.

    `options` are fields of the config that neither of the two contains.

    Raises:
        TypeError: the weights are not a mapping, or an option is not a field of the config.
        ValueError: no known model has these weights, or the weights and the config.json contradict
            each other.

    """
    checked_mapping("state_dict", weights)
    wrapped = find_wrapped(weights)
    for each in wrapped:
        if not each.is_prefix:
            raise ValueError(f"state_dict: it has keys of {each.description}")
    # A config.json names the model. Without one, the keys identify it.
    known = architectures()
    names, broken = ", ".join(each.family for each in known), broken_packages(ENTRY_POINTS)
    keys, model_type = [*map(str, weights)], (fields or {}).get("model_type")
    if model_type is not None:
        found = [each for each in known if model_type in each.model_types]
    else:
        found = [each for each in known if each.recognizes(weights)]
        found.sort(key=lambda each: not each.marks)  # marks are surer than common keys
    if not found and model_type is not None:
        name, *_ = (fields or {}).get("architectures") or [None]
        named = f" ({name})" if name else ""
        experts = ", a mixture of experts" if "moe" in str(model_type) else ""
        with_config = ", ".join(each.family for each in known if each.model_types)
        raise ValueError(
            f"config.json: model_type: expected that of {with_config}, got "
            f"{model_type}{named}{experts}{broken}"
        )
    # The weights may be in an entry of the state_dict or under a prefix, so the error says where.
    if not found:
        if place := next(filter(None, (each.locate(weights) for each in known)), None):
            raise ValueError(f"state_dict: {place}")
        if wrapped:
            raise ValueError(f"state_dict: it has keys of {wrapped[0].description}")
        others = filter(None, (each.confused_with(keys) for each in known))
        some = ", ".join(joined(sorted(keys))[:3]) or "no keys"
        own = "; from_torch reads it into a model or layer that you build"
        got = next(others, f"another model (it has {some}){own}")
        raise ValueError(f"state_dict: expected one of {names}, got {got}{broken}")
    config = found[0].from_checkpoint(weights, fields, **options)
    # Other configs are read from the weights alone, so the config.json may contradict them.
    if fields and not isinstance(config, HFConfig):
        for field, ours in SIZES.items():
            size = getattr(config, ours, None)
            if size is not None and _size(fields, field, size) != size:
                raise ValueError(
                    f"config.json: {field} is {fields[field]}, the weights have {size}"
                )
    return config


def _size(fields: Mapping[str, Any], name: str, default: int) -> Any:
    """Returns a size in a config.json, with the vocabulary padded as the config.json requires."""
    size = fields.get(name, default)
    if name == "vocab_size" and isinstance(multiple := fields.get("pad_vocab_size_multiple"), int):
        return -(-size // multiple) * multiple
    return size


@checked_options
def from_weights(
    weights: Mapping[str, Any],
    config: ModelConfig | None = None,
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype | None = None,
    sharding: ShardingOf | None = None,
    **fields: Any,
) -> LanguageModel | SileroVAD:
    """Loads a model from weights that are in memory, as `load_pretrained` does from a file.

        >>> weights = to_torch(RWKV7LanguageModelConfig(features=64).build(rngs=nnx.Rngs(0)))
        >>> model = from_weights(weights)

    The architecture, the layout and the sizes are read from the keys and the shapes. No weights are
    initialized at random.

    Args:
        weights: torch tensors or arrays by key, such as a `state_dict`; or the tree of a Flax
            model's variables, if one of the layouts has its keys, such as RecurrentGemma's.
        config: your own config, or one that `from_hf` has read from a config.json. None: the config
            is read from the weights.
        dtype: as in `load_pretrained`.
        param_dtype: as in `load_pretrained`. None: the widest dtype of the weights.
        sharding: as in `load_pretrained`.
        **fields: fields of the config that the weights do not determine.

    Raises:
        TypeError: the weights are not a mapping, or the config has no such field.
        ValueError: the weights are not those of a known model, or their keys and shapes contradict
            each other or the config.

    Warns:
        UserWarning: weights of parts that the model does not have are left out.

    """
    checked_mapping("weights", weights)
    state_dict = _without_tree(weights, architectures() if config is None else [type(config)])
    known: Any = config  # a dataclass, as every config is
    known = dataclasses.replace(known, **fields) if known else config_of(state_dict, **fields)
    state_dict = without_other_parts(known, state_dict)
    return loaded(known, state_dict, dtype=dtype, param_dtype=param_dtype, sharding=sharding)


def _without_tree(
    weights: Mapping[str, Any], configs: Iterable[type[ModelConfig]]
) -> Mapping[str, Any]:
    """Returns the variables of a Flax model by their keys. Other weights stay as they are."""
    if not any(isinstance(value, Mapping) for value in weights.values()):
        return weights
    flat = {key.removeprefix("params."): value for key, value in flattened(weights).items()}
    embeddings = {layout.embedding for config in configs for layout in config.layouts.values()}
    return flat if embeddings & flat.keys() else weights


def without_values(kinds: Any, build: Callable[[], Any]) -> Any:
    """Builds a model whose variables of these kinds are only shapes.

    Other variables, such as the random state of dropout, have their values.
    """
    model, others = nnx.eval_shape(build), nnx.Not(kinds)
    if nnx.state(model, others):
        nnx.update(model, jax.jit(lambda: nnx.state(build(), others))())
    return model


def loaded(
    config: Any,
    weights: Mapping[str, Any],
    *,
    dtype: Any = None,
    param_dtype: Any = None,
    sharding: ShardingOf | None = None,
) -> Any:
    """Builds a config's model, and reads each weight when its parameter is created.

    The options are those of `load_pretrained`. A weight in `config.float32_keys` that is wider than
    the other parameters keeps its dtype.
    """
    if param_dtype is None:
        param_dtype = _widest(w for k, w in weights.items() if not k.endswith(config.float32_keys))
    else:
        weights = cast(weights, param_dtype)
    if dtype is None and param_dtype == jnp.float16:
        dtype = jnp.float32

    def build() -> Any:
        return config.build(dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))

    model = without_values(WEIGHTS, build)
    # The weights that the config names keep their own dtype if it is wider than the parameter's.
    params, wide = params_of(model), config.float32_keys
    table = weight_table(model, None, weights)[1] if wide else []
    keys = {path: row.keys for row in table for path in row.params}
    for path, param in params.items():
        like = param.get_value()
        own = [weights[k] for k in keys.get(path, ()) if k in weights and k.endswith(wide)]
        dtype = _widest([like, *own]) if own else like.dtype
        # Place each parameter before its weight is read, so that a large model never lies whole on
        # one device.
        place = like.sharding if sharding is None else sharding(path, like.shape)
        if sharding is not None or dtype != like.dtype:
            param.set_value(jax.ShapeDtypeStruct(like.shape, dtype, sharding=place))
    return from_torch(model, weights)
