"""The files of a checkpoint's folder that say how text is tokenized and generated."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.command.chat import TEMPLATE
from train.command.pretrained import (
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CheckpointTokens,
    special_tokens,
)
from train.data.tokens import Tokens
from train.data.vocabulary import Subwords, first_token
from train.run.folder import Run

GENERATION = "generation_config.json"
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    GENERATION,
    TEMPLATE,
    "tokenizer.model",
    "added_tokens.json",
)
"""Files of a checkpoint's folder that do not depend on the layout of the weights."""
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The fields of a config.json, or of the `text_config` of a multimodal one, that name tokens."""


def tokens_of_run(run: Run) -> Tokens:
    """The vocabulary with which a run's model continues a prompt.

    A run that began from a checkpoint and kept its tokenizer encodes a prompt as the checkpoint
    does, with the special tokens that the tokenizer adds, and stops where the checkpoint stops.
    """
    if run.pretrained is None:
        return run.vocabulary
    assert isinstance(run.vocabulary, Subwords)
    return CheckpointTokens(run.pretrained, run.vocabulary.end)


def files_of_checkpoint(folder: Path) -> dict[str, bytes]:
    """The contents of the `FILES` that a folder has, by name."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def ids_of_checkpoint(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `IDS` in the fields of a config.json."""
    inner = config.get("text_config") or {}
    found = {name: config.get(name, inner.get(name)) for name in IDS}
    return {name: value for name, value in found.items() if name in config or name in inner}


def ids_of_run(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    """The `IDS` with which transformers begins and stops as `twinscan generate --run` does.

    `config` has the fields of the config.json of the checkpoint that the run began from, if any.
    Without such a checkpoint, all ids are given, null for none, because the default of some models
    is the id of another token.
    """
    ends = [end for end in tokens_of_run(run).ends if 0 <= end < run.config.model.vocab_size]
    eos = ends if len(ends) > 1 else next(iter(ends), None)
    if run.pretrained is not None:
        return ids_of_checkpoint(config) | {"eos_token_id": eos}
    # As a field of the model, the id of the padding would keep this token from being trained.
    return dict(zip(IDS, (first_token(run.vocabulary), eos, None), strict=True))


def files_of_run(run: Run, ids: Mapping[str, Any]) -> dict[str, bytes]:
    """The `FILES` for a run: those of the checkpoint that it began from, or else new ones."""
    vocabulary = run.vocabulary
    if run.pretrained is not None:
        files, known = files_of_checkpoint(run.pretrained), special_tokens(run.pretrained)
    else:
        files, known = {}, {}
    written: dict[str, dict[str, Any]] = {}
    if isinstance(vocabulary, Subwords):
        if run.pretrained is None:
            # A run encodes texts without the special tokens that a post-processor adds.
            unused = dict.fromkeys(("post_processor", "padding", "truncation"))
            written[TOKENIZER] = json.loads(vocabulary.definition) | unused
        if TOKENIZER_CONFIG not in files:
            written[TOKENIZER_CONFIG] = tokenizer_config(vocabulary, known)
        elif vocabulary.end not in (None, known.get("eos_token")):
            for name in {TOKENIZER_CONFIG, SPECIAL_TOKENS} & files.keys():
                written[name] = json.loads(files[name]) | {"eos_token": vocabulary.end}
    eos = ids["eos_token_id"]
    stated = json.loads(files.get(GENERATION, b"{}"))
    pad = ids.get("pad_token_id")
    if pad is None:
        pad = eos[0] if isinstance(eos, list) else eos
    written[GENERATION] = {**ids, "pad_token_id": pad} | stated | {"eos_token_id": eos}
    return files | {name: json.dumps(each, indent=2).encode() for name, each in written.items()}


def tokenizer_config(vocabulary: Subwords, known: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer_config.json with which transformers uses the tokenizer.json as it is.

    Without one, transformers chooses the class by the model and may build another tokenizer. The
    special tokens are those that a checkpoint names (`known`), or else the run's end of a text.
    """
    end = vocabulary.end
    ends = {} if end is None else dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    before = json.loads(vocabulary.definition).get("pre_tokenizer") or {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": before.get("add_prefix_space", False),
        **ends,
        **known,
    }
