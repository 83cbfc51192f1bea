"""Texts: their files, their documents, and their tokens in a cache that all runs share."""

import codecs
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock
import numpy as np

from train.data.published_vocabulary import PUBLISHED
from train.data.vocabulary import (
    BYTES,
    CHARACTERS,
    Bytes,
    Characters,
    Subwords,
    Vocabulary,
    read_tokenizer,
    to_text,
)
from train.data.windows import TokenArray, TokenFile
from train.process.digest import bytes_digest
from train.process.files import blocks, errors_naming, file_digest
from twinscan.command_line import CommandLineError
from twinscan.files import to_disk
from twinscan.heartbeat import doing

ALL_WORK = "\n" + 10 * "All work and no play makes Jack a doll boy. \n"
"""The default text, small enough to learn by heart."""
FORMAT_VERSION = 1
"""The version of the format of the token files, which is part of their names."""
TOKENS, MANIFEST = "tokens", "manifest.json"
LONGEST_LINE = 1 << 24
"""Longest line, in characters. A longer line may be divided anywhere."""
PIECES_AT_ONCE = 16
"""Number of pieces, of about a mebibyte each, that a tokenizer divides over the cores."""


class Text:
    """Documents in UTF-8: files, all files in folders, or by default `ALL_WORK`.

    Each file is a document, and so is the "text" of each line of a `.jsonl` file. If a `separator`
    is given, it ends a document, too.

    Raises:
        CommandLineError: a file is missing, unreadable, empty or not UTF-8.

    """

    def __init__(self, paths: Iterable[Path] = (), separator: str | None = None):
        self.files = [file for path in paths for file in _files(Path(path))]
        self.separator = separator
        self._digests = [_checked_digest(file) for file in self.files]
        self.has_documents = (
            len(self.files) > 1
            or separator is not None
            or any(_is_json_lines(file) for file in self.files)
        )
        """Whether there are several documents, each of which ends with a token."""

    @property
    def digest(self) -> str:
        """The digest of the text: that of its only file, or of its files' digests."""
        if not self.files:
            return bytes_digest(ALL_WORK.encode()).hexdigest()
        first, *others = self._digests
        return bytes_digest(" ".join(self._digests).encode()).hexdigest() if others else first

    def pieces(self) -> Iterator[str | None]:
        """The text in pieces, divided at line ends if possible. None ends a document."""
        if not self.files:
            yield ALL_WORK
            yield None
        for file in self.files:
            if _is_json_lines(file):
                yield from _documents_of_lines(file)
            else:
                yield from _divided(_decoded(file), self.separator)

    def build_vocabulary(self, tokenizer: str, end: str | None = None) -> Vocabulary:
        """The vocabulary of a new run on the text, from the value of `--tokenizer`."""
        if tokenizer == CHARACTERS:
            pieces = (piece for piece in self.pieces() if piece is not None)
            return Characters.from_pieces(pieces, has_end=self.has_documents)
        if tokenizer == BYTES:
            return Bytes(has_end=self.has_documents)
        try:
            if tokenizer in PUBLISHED:
                return PUBLISHED[tokenizer](has_end=self.has_documents)
            return read_tokenizer(Path(tokenizer), end)
        except ImportError as error:
            raise CommandLineError(f"--tokenizer: {error}") from None

    def tokens(self, vocabulary: Vocabulary, cache: Path | None = None) -> TokenArray:
        """Tokenizes the text into a file of the cache, or opens that file if it exists.

        Args:
            vocabulary: maps the text to tokens.
            cache: the folder of the files. None: `default_cache()`.

        Raises:
            CommandLineError: the vocabulary does not contain the whole text, or the cache cannot be
                written.

        """
        if self.has_documents and vocabulary.end_of_text is None:
            raise CommandLineError(
                "--text: there are several documents, but the vocabulary has no end-of-text token "
                "(give one file, or name a token of the tokenizer with --end-of-text)"
            )
        if not self.files:
            return vocabulary.encode(ALL_WORK, "--text")
        cache = cache or default_cache()
        kinds = [_is_json_lines(file) for file in self.files]
        identity = json.dumps(
            [FORMAT_VERSION, self._digests, kinds, self.separator, to_text(vocabulary)]
        )
        folder = cache / bytes_digest(identity.encode()).hexdigest()
        with errors_naming(cache):
            cache.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                if not folder.exists() or _is_damaged(folder):
                    self._write(vocabulary, folder)
                return TokenFile(folder / TOKENS, _dtype(vocabulary))

    def _write(self, vocabulary: Vocabulary, folder: Path) -> None:
        """Writes the tokens and their manifest into the folder, completely or not at all."""
        partial = folder.with_name(f"{folder.name}.partial")
        for old in (partial, folder):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        dtype = _dtype(vocabulary)
        digest, count = bytes_digest(), 0
        try:
            with (
                (partial / TOKENS).open("wb") as file,
                doing(lambda: f"tokenizing the text: {count:,} {vocabulary.unit}s so far"),
            ):
                for tokens in _encoded(self.pieces(), vocabulary, has_end=self.has_documents):
                    data = tokens.astype(dtype).tobytes()
                    digest.update(data)
                    file.write(data)
                    count += len(tokens)
            to_disk(partial / TOKENS)
            for source, known in zip(self.files, self._digests, strict=True):
                if file_digest(source) != known:
                    raise CommandLineError(f"{source}: the file changed while it was read")
            manifest = {
                "sources": dict(zip(map(str, self.files), self._digests, strict=True)),
                "vocabulary": bytes_digest(to_text(vocabulary).encode()).hexdigest(),
                "dtype": dtype.name,
                "tokens": count,
                "digest": digest.hexdigest(),
            }
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            to_disk(partial / MANIFEST)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def default_cache() -> Path:
    """`twinscan` in $XDG_CACHE_HOME, or in ~/.cache."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinscan"
    except RuntimeError:
        raise CommandLineError("--cache: required, because there is no home folder") from None


def _files(path: Path) -> list[Path]:
    """The file, or all files in the folder except hidden ones, sorted."""
    with errors_naming(path):
        if not path.is_dir():
            return [path]
        found = []
        for folder, folders, files in os.walk(path, onerror=_raise):
            folders[:] = [name for name in folders if name[0] != "."]
            found += [Path(folder, name) for name in files if name[0] != "."]
    if not found:
        raise CommandLineError(f"{path}: the folder has no files")
    return sorted(found)


def _raise(error: OSError) -> None:
    """Raises the error of an unreadable folder, which `os.walk` would ignore."""
    raise error


def _checked_digest(file: Path) -> str:
    with errors_naming(file):
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CommandLineError(f"{file}: expected a file or a folder")
        if not status.st_size:
            raise CommandLineError(f"{file}: the file is empty")
        return file_digest(file)


def _is_json_lines(file: Path) -> bool:
    return file.suffix == ".jsonl"


def _decoded(file: Path) -> Iterator[str]:
    """The text of a file, with newlines as line ends."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    place = 0
    with errors_naming(file):
        for block in _with_end(blocks(file)):
            begin = place - len(utf8.getstate()[0])
            try:
                text = utf8.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise CommandLineError(f"{file}: not UTF-8 at byte {begin + error.start}") from None
            place += len(block)
            yield newlines.decode(text, final=not block)


def _with_end(data: Iterable[bytes]) -> Iterator[bytes]:
    yield from data
    yield b""


def _divided(texts: Iterable[str], separator: str | None) -> Iterator[str | None]:
    """Divides a text at the separator into documents, in pieces. None ends a document."""
    rest, is_open = "", False
    for text in texts:
        *ended, rest = (rest + text).split(separator) if separator else [rest + text]
        for document in ended:
            if document:
                yield document
            if document or is_open:
                yield None
            is_open = False
        if cut := _cut_index(rest, len(rest) - len(separator or "")):
            yield rest[:cut]
            rest, is_open = rest[cut:], True
    if rest:
        yield rest
    if rest or is_open:
        yield None


def _cut_index(text: str, end: int) -> int:
    """The index after the last newline before `end` that has no whitespace next to it.

    Tokenizers divide the text there anyway. Without such a newline, the index is `end` if that is
    at least `LONGEST_LINE`, and otherwise 0.
    """
    newline = text.rfind("\n", 0, max(end, 0))
    while newline > 0 and len("".join(text[newline - 1 : newline + 2].split())) < 2:
        newline = text.rfind("\n", 0, newline)
    if newline > 0:
        return newline + 1
    return end if end >= LONGEST_LINE else 0


def _documents_of_lines(file: Path) -> Iterator[str | None]:
    """The "text" of each JSON object, one per line."""
    with errors_naming(file), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)["text"]
                if not isinstance(document, str):
                    raise TypeError
                document.encode("utf-8")
            except (KeyError, RecursionError, TypeError, ValueError):
                raise CommandLineError(
                    f'{file}: line {number}: expected a JSON object with a string "text", in UTF-8'
                ) from None
            if document:
                yield document
                yield None


def _encoded(
    pieces: Iterable[str | None], vocabulary: Vocabulary, *, has_end: bool
) -> Iterator[np.ndarray]:
    """The tokens of the pieces. With `has_end`, a token ends each document."""
    end = np.array([vocabulary.end_of_text] if has_end else [], np.int32)
    if not isinstance(vocabulary, Subwords):
        for piece in pieces:
            yield end if piece is None else vocabulary.encode(piece, "--text")
        return
    waiting: list[str | None] = []
    for piece in pieces:
        waiting.append(piece)
        if len(waiting) == PIECES_AT_ONCE:
            yield from _encoded_together(waiting, vocabulary, end)
            waiting = []
    yield from _encoded_together(waiting, vocabulary, end)


def _encoded_together(
    pieces: list[str | None], vocabulary: Subwords, end: np.ndarray
) -> Iterator[np.ndarray]:
    texts = [piece for piece in pieces if piece is not None]
    encodings = iter(vocabulary.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for piece in pieces:
        yield end if piece is None else np.array(next(encodings).ids, np.int32)


def _dtype(vocabulary: Vocabulary) -> np.dtype:
    """The narrowest dtype that holds the tokens."""
    return np.min_scalar_type(len(vocabulary) - 1)


def _is_damaged(folder: Path) -> bool:
    """Whether a token file does not match its manifest. If so, prints that to stderr."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_damaged = file_digest(folder / TOKENS) != manifest["digest"]
    except (KeyError, OSError, TypeError, ValueError):
        is_damaged = True
    if is_damaged:
        print(f"{folder}: the cached tokens are damaged; tokenizing again", file=sys.stderr)
    return is_damaged
