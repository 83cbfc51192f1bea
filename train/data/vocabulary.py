"""Vocabularies: characters, bytes, and those of a tokenizer.json."""

import codecs
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from jax_models.checks.values import described
from jax_models.options import CheckedFields, checked_options
from train.data.published_vocabulary import PUBLISHED, Nucleotides, World
from train.data.tokens import until_end
from train.process.files import errors_naming
from twinscan.command_line import CommandLineError

CHARACTERS, BYTES = "characters", "bytes"
NAMES = (CHARACTERS, BYTES, *PUBLISHED)
"""The vocabularies that have a name instead of a file."""
CODE_POINTS = 0x110000
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Common names of the token that ends a document."""


@dataclasses.dataclass(frozen=True)
class Characters(CheckedFields):
    """The distinct characters of a text, sorted. A token is the index of a character.

    If the text has several documents, the last token ends a document.
    """

    characters: str
    has_end: bool = False
    unit: ClassVar[str] = "character"

    @classmethod
    @checked_options
    def of(cls, text: str) -> "Characters":
        """The vocabulary of the characters of a text."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_pieces(cls, pieces: Iterable[str], *, has_end: bool) -> "Characters":
        """The vocabulary of the characters of a text that is given in pieces."""
        occurs = np.zeros(CODE_POINTS, bool)
        for piece in pieces:
            occurs[_codes(piece)] = True
        return cls("".join(map(chr, np.flatnonzero(occurs))), has_end)

    def __len__(self) -> int:
        return len(self.characters) + self.has_end

    @property
    def end_of_text(self) -> int | None:
        """The last token; None if the text is a single document."""
        return len(self.characters) if self.has_end else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The token that ends a document, if there is one."""
        return (len(self.characters),) if self.has_end else ()

    def fields(self) -> dict[str, Any]:
        """The fields that `from_fields` reads."""
        return {CHARACTERS: self.characters, "has_end": self.has_end}

    @checked_options
    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text, int32. Errors call the text `name`.

        Raises:
            CommandLineError: the text has characters outside the vocabulary.

        """
        codes, known = _codes(text), _codes(self.characters)
        tokens = np.searchsorted(known, codes).astype(np.int32)
        is_known = known[np.minimum(tokens, len(known) - 1)] == codes
        if not is_known.all():
            unknown = [*map(chr, np.unique(codes[~is_known]))]
            raise CommandLineError(
                f"{name}: not in the vocabulary: {', '.join(map(repr, unknown[:20]))}"
                f"{' …' if len(unknown) > 20 else ''}; it has {self.characters!r}"
            )
        return tokens

    def decode(self, tokens: ArrayLike) -> str:
        """Decodes tokens. A token that ends a document adds nothing."""
        return "".join(self.characters[token : token + 1] for token in np.ravel(tokens))

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens piece by piece, up to the end of the text."""
        return map(self.decode, until_end(tokens, *self.ends))


@dataclasses.dataclass(frozen=True)
class Bytes(CheckedFields):
    """The 256 bytes of text in UTF-8. With several documents, token 256 ends a document."""

    has_end: bool = False
    unit: ClassVar[str] = "byte"

    def __len__(self) -> int:
        return 256 + self.has_end

    @property
    def end_of_text(self) -> int | None:
        """Token 256; None if the text is a single document."""
        return 256 if self.has_end else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The token that ends a document, if there is one."""
        return (256,) if self.has_end else ()

    def fields(self) -> dict[str, Any]:
        """The fields that `from_fields` reads."""
        return {BYTES: True, "has_end": self.has_end}

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The bytes of a text, int32."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens piece by piece, up to the end of the text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in until_end(tokens, *self.ends):
            yield decoder.decode(bytes([token]) if token < 256 else b"\xff")
        yield decoder.decode(b"", final=True)


class Subwords:
    """The tokens of a `tokenizer.json`, as the package `tokenizers` writes it.

    Args:
        definition: the content of the file.
        end: the token that ends a document. None: a token with a common name, if there is one.

    Raises:
        ImportError: the package is not installed.
        ValueError: the content is not a tokenizer, or the tokenizer does not have this token.

    """

    unit: ClassVar[str] = "token"

    def __init__(self, definition: str, end: str | None = None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError("expected the package tokenizers: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_str(definition)
        except Exception as error:  # tokenizers has no exception class of its own
            raise ValueError(f"not a tokenizer: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.definition = definition
        numbers = self.tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in numbers:
            raise ValueError(f"the tokenizer has no token {end!r}")
        self.end = end or next((name for name in ENDS_OF_TEXT if name in numbers), None)
        self.end_of_text: int | None = None if self.end is None else numbers[self.end]
        self.ends: tuple[int, ...] = () if self.end is None else (numbers[self.end],)
        self._size = max(numbers.values()) + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subwords) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.definition)

    def __len__(self) -> int:
        return self._size

    def fields(self) -> dict[str, Any]:
        """The fields that `from_fields` reads."""
        return {"tokenizer": self.definition, "end": self.end}

    def encode(self, text: str, name: str = "text") -> np.ndarray:
        """The tokens of a text, int32."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def pieces(self, tokens: Iterable[ArrayLike]) -> Iterator[str]:
        """Decodes tokens piece by piece, up to the end of the text."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for token in until_end(tokens, *self.ends):
            yield stream.step(self.tokenizer, token) or ""


def checked_vocabulary(name: str, vocabulary: Any) -> "Vocabulary":
    """Checks that an argument is a vocabulary."""
    if not isinstance(vocabulary, Characters | Bytes | Subwords | World | Nucleotides):
        raise TypeError(f"{name}: expected a vocabulary, got {described(vocabulary)}")
    return vocabulary


Vocabulary = Annotated[Characters | Bytes | Subwords | World | Nucleotides, checked_vocabulary]
"""The vocabulary of a run. `unit` is the word for one token; `end_of_text` ends a document."""


def first_token(vocabulary: Vocabulary) -> int:
    """The token before a new text: the end of another text, or token 0 if texts have no end."""
    return vocabulary.end_of_text or 0


def from_fields(fields: dict[str, Any]) -> Vocabulary:
    """The vocabulary with these `fields`.

    Raises:
        ValueError: these are not the fields of a vocabulary.

    """
    has_end = fields.get("has_end", False)
    if CHARACTERS in fields:
        return Characters(fields[CHARACTERS], has_end)
    if BYTES in fields:
        return Bytes(has_end)
    if "tokenizer" in fields:
        return Subwords(fields["tokenizer"], fields.get("end"))
    if fields.get("published") in PUBLISHED:
        return PUBLISHED[fields["published"]](has_end)
    raise ValueError("expected characters, bytes, a tokenizer or a published vocabulary")


def read_tokenizer(path: Path, end: str | None) -> Subwords:
    """The vocabulary of a `tokenizer.json`.

    Raises:
        CommandLineError: the file does not exist or is not a tokenizer.
        ImportError: `tokenizers` is not installed.

    """
    try:
        with errors_naming(path):
            return Subwords(path.read_text(encoding="utf-8"), end)
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise CommandLineError(f"--tokenizer: {path}: {first}") from None


def to_text(vocabulary: Vocabulary) -> str:
    """A string that is equal for equal vocabularies."""
    return json.dumps(vocabulary.fields(), sort_keys=True)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
