"""Small published models with random weights, and the folder of a RecurrentGemma."""

import json
from pathlib import Path

import jax
import numpy as np
import tokenizers
from flax import nnx
from safetensors.flax import save_file

from jax_models import GriffinLanguageModelConfig, LanguageModel, to_torch

FIELDS = {
    "model_type": "recurrent_gemma",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_window_size": 4,
}


def random_model(config, **options) -> LanguageModel:
    """A model with random weights, because many initial weights are zero."""
    model = config.build(**options, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def drawn(x):
        return (0.4 * rng.standard_normal(x.shape, np.float32)).astype(x.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model)))
    return model


def write_recurrent_gemma(
    folder: Path, words: list[str], begin: str, *, dtype: str = "float32", **fields
) -> LanguageModel:
    """Writes a model as transformers does, in two files, with a tokenizer of whole words.

    The tokenizer has the first word for unknown ones, and adds `begin` before a text.
    """
    folder.mkdir()
    fields = FIELDS | {"vocab_size": len(words), "dtype": dtype} | fields
    model = random_model(GriffinLanguageModelConfig.from_hf(fields), param_dtype=dtype)
    weights = to_torch(model, "hf-file")
    place = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(weights)}
    for name in {*place.values()}:
        save_file({key: weights[key] for key in weights if place[key] == name}, folder / name)
    index = {"weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(fields))
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, numbers[begin])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model
