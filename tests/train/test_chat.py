"""`twinscan generate` with chat templates, several prompts and stop tokens."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from recurrent_gemma import write_recurrent_gemma

from jax_models import LanguageModel, generate
from train.command import generate as command
from train.command.chat import ChatTemplate
from twinscan.command_line import CommandLineError

FOLDER = Path("chat")
WORDS = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", *"abcdefgh"]
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("no such role: " ~ message.role) }}
    {%- endif %}
    {%- if message["content"] is string %}
        {{- " <|user|> " + message["content"] | trim + " " + eos_token }}
    {%- else %}
        {{- message.content | tojson }}
        {%- break %}
    {%- endif %}
{%- endfor %}
  {% if add_generation_prompt %}
 <|user|>
{% generation %}{% endgeneration %}
{% endif %}
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"content": "<s>", "__type": "AddedToken"},
    "eos_token": "</s>",
    "chat_template": TEMPLATE,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, LanguageModel]:
    """The folder of a chat model, and the model. Its tokenizer adds a token before a text."""
    folder = tmp_path_factory.mktemp("written") / FOLDER
    model = write_recurrent_gemma(folder, WORDS, "<s>", eos_token_id=[2, 10_000, -1])
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return folder, model


@pytest.fixture
def model(written, tmp_path, monkeypatch) -> LanguageModel:
    """The chat model, in the folder `FOLDER`, which a test may change."""
    monkeypatch.chdir(tmp_path)
    folder, model = written
    shutil.copytree(folder, FOLDER)
    return model


def words(tokens) -> str:
    """The text of tokens up to one that ends it."""
    numbers = [*np.asarray(tokens).tolist(), 2]
    return " ".join(WORDS[token] for token in numbers[: numbers.index(2)])


CHATS = [
    [{"role": "user", "content": " a  b\n"}],
    [{"role": "system", "content": "c"}, {"role": "user", "content": "<a> & 'é'"}],
    [{"role": "user", "content": [{"type": "text", "text": "<é>"}]}, {"role": "user"}],
]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "named"])
def test_a_template_is_rendered_as_transformers_renders_it(place):
    transformers = pytest.importorskip("transformers")
    config = dict(TOKENIZER_CONFIG)
    if place == "named":
        both = [("tool", "x"), ("default", TEMPLATE)]
        config["chat_template"] = [{"name": n, "template": t} for n, t in both]
    elif place == "chat_template.jinja":
        (FOLDER / place).write_text(TEMPLATE)
        config["chat_template"] = "another"
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for chat in CHATS:
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(FOLDER).render(chat) == expected


def test_the_answer_to_a_message_is_printed(model, capsys):
    options = ["--num-tokens", "9", "--top-p", "0.8", "--repetition-penalty", "1.2"]
    command.main([
        *["--weights", "chat", "--prompt", "a b", "--chat", "--system", "c"],
        *options,
    ])  # fmt: skip
    prompt = [[1, 3, WORDS.index("c"), 2, 3, WORDS.index("a"), WORDS.index("b"), 2, 3]]
    filters = {"top_p": 0.8, "repetition_penalty": 1.2}
    tokens = generate(model, prompt, 9, key=jax.random.key(0), **filters)
    assert capsys.readouterr().out.strip() == words(tokens[0])


@pytest.mark.slow
def test_several_prompts_are_continued_together(model, capsys):
    """Each one up to its own end. A `--stop` ends a text like the model's own tokens."""
    prompts = ["a b c", "d", "e f"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    command.main(["--weights", "chat", *arguments, "--greedy", "--num-tokens", "12"])
    lines = capsys.readouterr().out.splitlines()
    for prompt, line in zip(prompts, lines, strict=True):
        alone = [[1, *map(WORDS.index, prompt.split())]]
        tokens = generate(model, alone, 12, key=jax.random.key(0), temperature=0)
        assert line.removeprefix(prompt).strip() == words(tokens[0])
    # Stop at the last word of the first text.
    stop = lines[0].split()[-1]
    command.main([
        *["--weights", "chat", "--prompt", prompts[0], "--greedy", "--num-tokens", "12"],
        *["--stop", stop, "--stop", "h"],
    ])  # fmt: skip
    drawn = lines[0].removeprefix(prompts[0]).split()
    end = min(drawn.index(word) for word in (stop, "h") if word in drawn)
    assert capsys.readouterr().out.removeprefix(prompts[0]).split() == drawn[:end]


@pytest.mark.usefixtures("model")
def test_a_prompt_without_tokens_is_refused():
    """A tokenizer that adds no token has none for a space."""
    path = FOLDER / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    with pytest.raises(CommandLineError, match=r"^--prompt: expected at least one token$"):
        command.main(["--weights", "chat", "--prompt", "a", "--prompt", " "])


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{}", r"--chat: chat: no chat template: neither chat_template"),
        ("tokenizer_config.json", "[", r"--chat: chat: tokenizer_config.json: "),
        ("chat_template.jinja", "{% if %}", r"--chat: chat: chat template: Expected an expr"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", r"chat: chat template: no$"),
        ("chat_template.jinja", "{{ messages.append(1) }}", "template: .*append.* is unsafe"),
    ],
)
def test_a_folder_without_a_sound_template_is_refused(name, content, message):
    (FOLDER / name).write_text(content)
    with pytest.raises(CommandLineError, match=message) as refused:
        command.main(["--weights", "chat", "--prompt", "a", "--chat"])
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("model")
def test_a_template_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2.ext", None)
    with pytest.raises(CommandLineError, match=r"--chat: chat: .* pip install jinja2"):
        command.main(["--weights", "chat", "--prompt", "a", "--chat"])
