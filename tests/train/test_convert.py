"""`twinscan convert` writes another layout or dtype, completely or not at all."""

import contextlib
import dataclasses
import json
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import train.command.convert as command
from jax_models import (
    GriffinLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    LFM2LanguageModelConfig,
    Qwen35LanguageModelConfig,
    RWKVLanguageModelConfig,
    load_pretrained,
    stream,
    to_torch,
)
from jax_models.models.load import loaded
from train.command import generate
from train.command.generation_files import files_of_run, ids_of_run
from train.command.initial_weights import files_to_keep, read_params
from train.data.tokens import until_end
from train.data.vocabulary import Characters, read_tokenizer
from train.run.config import TrainConfig
from train.run.folder import Run, build_trainer
from twinscan.command_line import CommandLineError

GRIFFIN = GriffinLanguageModelConfig(
    vocab_size=12, features=8, num_layers=3, recurrent_features=8, mlp_features=6, num_heads=2,
    window=5, logits_soft_cap=7.0,
)  # fmt: skip
RWKV = RWKVLanguageModelConfig(vocab_size=12, features=8, num_layers=3, hidden_features=16)


def random_weights(config, layout):
    """Sets all parameters to random values. Tied ones stay equal."""
    rng = np.random.default_rng(0)
    weights = to_torch(config.build(rngs=nnx.Rngs(0)), layout)
    return {k: rng.standard_normal(w.shape).astype(w.dtype) for k, w in weights.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A RecurrentGemma of transformers, with a tokenizer and a config field that we do not know."""
    monkeypatch.chdir(tmp_path)
    folder = Path("griffin")
    folder.mkdir()
    save_file(random_weights(GRIFFIN, "hf-file"), folder / "model.safetensors")
    config = GRIFFIN.to_hf() | {"eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(*args):
    command.main([str(arg) for arg in args])


def test_there_and_back_bit_for_bit(folder, capsys):
    convert("--from", folder, "--to", "d.safetensors", "--layout", "deepmind")
    assert (
        capsys.readouterr().out
        == "d.safetensors: GriffinLanguageModel in layout deepmind, 0.0 MB\n"
    )
    assert "embedder.input_embedding" in load_file("d.safetensors")
    convert("--from", "d.safetensors", "--to", "t.pth", "--layout", "deepmind-torch")
    convert("--from", "t.pth", "--to", "back", "--layout", "hf")
    before, after = (load_file(f / "model.safetensors") for f in (folder, Path("back")))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert after[key].tobytes() == array.tobytes(), key


def test_the_config_and_the_tokenizer_come_along(folder):
    convert("--from", folder, "--to", "other", "--layout", "hf", "--param-dtype", "bfloat16")
    config = json.loads(Path("other/config.json").read_text())
    assert config == GRIFFIN.to_hf() | {"eos_token_id": 3, "dtype": "bfloat16"}
    assert GriffinLanguageModelConfig.from_hf(config) == GRIFFIN
    assert Path("other/tokenizer.json").read_text() == "{}"
    weights = load_file(folder / "model.safetensors")
    for key, array in to_torch(load_pretrained("other"), "hf-file").items():
        assert array.tobytes() == weights[key].astype(jnp.bfloat16).tobytes(), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_all_floating_weights_get_the_dtype_of_a_run(dtype):
    """Also those that are not trained, such as HyenaDNA's positions, and without JAX's x64."""
    config = HyenaDNALanguageModelConfig(context_length=32, features=8, mlp_features=9)
    model = command.with_param_dtype(config.build(rngs=nnx.Rngs(0)), dtype)
    assert {str(array.dtype) for array in to_torch(model).values()} == {dtype}


def test_large_weights_are_written_in_parts(folder, monkeypatch):
    monkeypatch.setattr(command, "MOST", 2000)
    convert("--from", folder, "--to", "parts", "--layout", "hf")
    index = json.loads(Path("parts/model.safetensors.index.json").read_text())["weight_map"]
    assert {*index.values()} == {path.name for path in Path("parts").glob("*.safetensors")}
    assert len({*index.values()}) > 2
    assert max(path.stat().st_size for path in Path("parts").glob("*.safetensors")) < 5000
    before, after = (to_torch(load_pretrained(each)) for each in (folder, "parts"))
    for key, array in before.items():
        assert after[key].tobytes() == array.tobytes(), key


@pytest.mark.slow
def test_transformers_loads_what_is_written(tmp_path, monkeypatch):
    """Its own `from_pretrained` loads RWKV-4 strictly, and the logits are equal.

    `tests/models/test_peers_hybrids.py` exports the other models of transformers.
    """
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    weights = random_weights(RWKV, "blinkdl")
    weights = {key: w if w.ndim > 1 else 0.1 * w for key, w in weights.items()}
    save_file(weights, "a.safetensors")
    convert("--from", "a.safetensors", "--to", "hf", "--layout", "hf")
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        "hf", output_loading_info=True, rescale_every=0
    )
    assert not any(report.values()), report
    tokens = np.arange(5)[None]
    with torch.no_grad():
        theirs = read.eval()(torch.tensor(tokens), use_cache=False).logits.numpy()
    ours = np.asarray(load_pretrained("hf")(tokens)[0])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def byte_level():
    """As in GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )


def byte_fallback():
    """As in Gemma and Llama, with a token before each text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(joined)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, trainers.BpeTrainer(
        vocab_size=330, special_tokens=[*SPECIAL, *in_bytes], show_progress=False
    )


def word_piece():
    """As in BERT, with a token before each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))]
    )
    return tokenizer, trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=SPECIAL, show_progress=False
    )


SPECIAL = ["<pad>", "<unk>", "<bos>", "<end>", "<turn>", "<stop>"]
SAMPLE = "A gate decides what the state keeps, and what it forgets: naïve ✓.\n" * 4
PROMPT = "What it keeps … ✗"
MODELS = {
    byte_level: Qwen35LanguageModelConfig(
        features=16, num_layers=2, mlp_features=20, num_heads=2, num_kv_heads=1, num_key_heads=2,
        head_features=8, num_value_heads=2, key_features=4, value_features=4,
        block_types=("linear_attention", "full_attention"),
    ),
    byte_fallback: GRIFFIN,
    word_piece: LFM2LanguageModelConfig(
        features=16, num_layers=2, mlp_features=20, num_heads=2, num_kv_heads=1,
        block_types=("conv", "full_attention"),
    ),
}  # fmt: skip


def greedy(model, prompt, ends=()):
    """The greedy continuation, up to one of the ends."""
    tokens = stream(model, np.array([prompt]), 40, temperature=0.0, stop_tokens=ends)
    return [*until_end(tokens, *ends)]


def with_written(token, weights, config, prompt):
    """Exchanges `token` with one that the model writes, neither first nor in the prompt.

    Returns the weights and the number of tokens that the model writes before it.
    """
    written = greedy(loaded(config, weights), prompt)
    count = next(i for i, each in enumerate(written) if i and each not in [*prompt, *written[:i]])
    ids = np.arange(config.vocab_size)
    ids[[token, written[count]]] = written[count], token
    token_keys = {key for key in weights if "embed_tokens" in key or "lm_head" in key}
    return {key: w[ids] if key in token_keys else w for key, w in weights.items()}, count


def test_a_run_without_an_end_of_text_never_stops(tmp_path):
    """Null replaces the defaults of transformers' models, such as 2 for LFM2."""
    run = Run.create(tmp_path / "run", TrainConfig(), Characters("abc"), "")
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    assert ids_of_run(run, {}) == ids
    assert {name: json.loads(file) for name, file in files_of_run(run, ids).items()} == {
        "generation_config.json": ids
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        (byte_level, "new"),
        (word_piece, "new"),
        (byte_fallback, "from a checkpoint"),
        (byte_fallback, "another end"),
        (byte_fallback, "another tokenizer"),
    ],
)
def test_transformers_generates_what_a_run_generates(kind, begins, tmp_path, monkeypatch):
    """It encodes a prompt with the same tokens, continues it with the same ones, and stops."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator([SAMPLE], trainer)
    is_kept = begins in ("from a checkpoint", "another end")
    end, last = {"from a checkpoint": ("<end>", 4), "new": ("<end>", 3)}.get(begins, ("<stop>", 5))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=is_kept).ids
    config = dataclasses.replace(MODELS[kind], vocab_size=tokenizer.get_vocab_size())
    weights = random_weights(config, "hf-file")
    weights, count = with_written(last, weights, config, prompt)

    # The folder of a checkpoint as transformers writes it, with two tokens that end a text.
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template="a template", **names
    ).save_pretrained("folder")
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": [3, 4]}
    Path("folder/config.json").write_text(json.dumps(config.to_hf() | ids))
    Path("folder/generation_config.json").write_text(json.dumps(ids | {"top_k": 7}))
    save_file(weights, "folder/model.safetensors")
    tokenizer.enable_truncation(3)
    tokenizer.save("tokenizer.json")

    file = Path("folder/tokenizer.json" if is_kept else "tokenizer.json")
    vocabulary = read_tokenizer(file, end)
    init = None if begins == "new" else Path("folder")
    options = TrainConfig(model=config, batch_size=2, window=8, init=init)
    run = Run.create(Path("run"), options, vocabulary, "", files_to_keep(init, vocabulary))
    run_trainer = build_trainer(options, vocabulary)
    params = read_params(run_trainer, options, Path("folder"))
    run.checkpoints.save(0, run_trainer.initial_state(params), None)
    run.checkpoints.close()
    convert("--from", "run", "--to", "written")

    for source in ({"run": Path("run")}, {"weights": Path("written")}):
        opened = generate._open_model_and_prompts(generate.Arguments(**source, prompt=(PROMPT,)))
        assert opened.prompts[0].tolist() == prompt
        ours = greedy(opened.model, prompt, opened.vocabulary.ends)
        assert len(ours) == count
    theirs = transformers.AutoTokenizer.from_pretrained("written")
    tokens = theirs(PROMPT, return_tensors="pt")
    assert tokens["input_ids"][0].tolist() == prompt
    model = transformers.AutoModelForCausalLM.from_pretrained("written").eval()
    answer = model.generate(**tokens, max_new_tokens=40, do_sample=False)[0].tolist()
    assert answer == [*prompt, *ours, last]
    assert theirs.eos_token == end
    shown = theirs.decode(answer[len(prompt) :], skip_special_tokens=True)
    assert shown == "".join(vocabulary.pieces(ours))
    if is_kept:
        assert theirs.pad_token == "<pad>"
        assert theirs.chat_template == "a template"
        assert model.generation_config.top_k == 7


def test_what_cannot_be_written_is_refused(folder):
    Path("there").mkdir()
    for args, message in (
        (("--to", "there"), "--to: there exists"),
        (("--to", "new", "--layout", "gguf"), r"--layout: GriffinLanguageModel .* not 'gguf'"),
        (("--to", "nowhere/a.safetensors"), "nowhere"),
        (("--to", "new", "--param-dtype", "int8"), "param.dtype"),
    ):
        with pytest.raises(CommandLineError, match=message):
            convert("--from", folder, *args)
    with pytest.raises(CommandLineError, match="no-such-folder: No such file or directory"):
        convert("--from", "no-such-folder", "--to", "new")
    assert sorted(path.name for path in Path().iterdir()) == ["griffin", "there"]


@contextlib.contextmanager
def full_disk():
    """Limits files to 1000 bytes. Meanwhile, JAX does not write compiled programs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", np.inf)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)


@pytest.mark.parametrize("target", ["new", "new.safetensors", "new.pth"])
def test_a_write_that_fails_leaves_nothing(folder, target):
    with pytest.raises(CommandLineError, match=f"^{target}: File too large$"), full_disk():
        convert("--from", folder, "--to", target, "--layout", "hf")
    assert [path.name for path in Path().iterdir()] == ["griffin"]
