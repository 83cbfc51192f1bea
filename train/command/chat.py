"""Chat templates of published checkpoints."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from train.command.pretrained import TOKENIZER_CONFIG, optional_json, special_tokens

TEMPLATE = "chat_template.jinja"


class ChatTemplate:
    """The chat template in a checkpoint's folder, rendered as transformers renders it.

    The template is chat_template.jinja, or else the `chat_template` of tokenizer_config.json, where
    that named "default" counts if there are several.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the folder has no template, or the template is wrong.

    """

    def __init__(self, folder: Path):
        config = optional_json(folder / TOKENIZER_CONFIG)
        self.special_tokens = special_tokens(folder)
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {each["name"]: each["template"] for each in source}.get("default")
        if (folder / TEMPLATE).exists():
            source = (folder / TEMPLATE).read_text(encoding="utf-8")
        if not isinstance(source, str):
            raise ValueError(
                f"no chat template: neither {TEMPLATE} nor a chat_template in {TOKENIZER_CONFIG}"
            )
        environment = _environment()
        with _template_errors():
            self.template = environment.from_string(source)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of messages `{"role": …, "content": …}` and the beginning of the answer."""
        with _template_errors():
            return self.template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )


def _environment() -> Any:
    """The environment in which transformers renders templates: a sandbox, because they are code."""
    try:
        import jinja2.ext
        import jinja2.nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("a chat template needs the package jinja2: pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        """The block {% generation %}, which marks answers for training and changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Returns the content of the block."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Turns the errors of a template into a ValueError."""
    try:
        yield
    except Exception as error:  # a template may raise anything, such as a TypeError
        raise ValueError(f"chat template: {error}") from None
