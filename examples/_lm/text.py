"""Real text in, split into what the model is only shown (the prompt) and what it is trained to write (the answer).

Python source: comments and docstrings are the prompt, the code is the answer.
Any other text: the first half of the words of every paragraph (lines between blank lines) is the prompt, the rest the
answer.
"""

from __future__ import annotations

import ast
import io
import os
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PYTHON_SUFFIXES = frozenset({".py", ".pyi", ".pyw"})

# Installed packages are not the standard library, and its own tests are absent from many installations.
NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


BLANK_LINES = re.compile(r"\n\s*\n|\Z")
WORD = re.compile(r"\S+")


class InputError(Exception):
    """Something the user gave cannot be used; the message is one line for them to read."""


class Span(NamedTuple):
    """Characters `start` (included) to `end` (excluded) of a text."""

    start: int
    end: int


class Segment(NamedTuple):
    """A piece of a document; the model is trained on it only if it is part of the answer."""

    text: str
    is_answer: bool


@dataclass(frozen=True)
class Corpus:
    """Documents in training order, each a sequence of segments that join to the whole text."""

    documents: tuple[tuple[Segment, ...], ...]
    skipped: int
    """Files found in a directory that are not text (or may not be read)."""

    @property
    def characters(self) -> int:
        return sum(len(segment.text) for document in self.documents for segment in document)


def python_prompt_spans(source: str) -> list[Span]:
    """Find the comments and docstrings of a Python source whose lines end in newlines only.

    Raises SyntaxError, ValueError, RecursionError or tokenize.TokenError where the source is not valid Python.
    """
    lines = source.split("\n")
    line_starts = [0]
    for line in lines:
        line_starts.append(line_starts[-1] + len(line) + 1)

    spans = [
        Span(line_starts[token.start[0] - 1] + token.start[1], line_starts[token.end[0] - 1] + token.end[1])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a doubtful escape sequence in the user's text is not our concern
        tree = ast.parse(source)

    def position(line_number: int, byte_column: int) -> int:
        """Turn the parser's (line, column in UTF-8 bytes) into an index of characters."""
        prefix = lines[line_number - 1].encode()[:byte_column]
        return line_starts[line_number - 1] + len(prefix.decode())

    for docstring in _docstrings(tree):
        end = position(docstring.end_lineno or docstring.lineno, docstring.end_col_offset or docstring.col_offset)
        spans.append(Span(position(docstring.lineno, docstring.col_offset), end))
    return _merged(spans)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the string constants that Python itself would store as `__doc__`."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Sort spans and join those that touch: a docstring of several literals may have comments between them."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def prose_prompt_spans(text: str) -> list[Span]:
    """Find the first half (rounded down) of every paragraph's words, as one span each."""
    spans = []
    start = 0
    for blank_lines in BLANK_LINES.finditer(text):
        words = list(WORD.finditer(text, start, blank_lines.start()))
        prompt_words = len(words) // 2
        if prompt_words:
            spans.append(Span(words[0].start(), words[prompt_words - 1].end()))
        start = blank_lines.end()
    return spans


def split_segments(text: str, spans: Sequence[Span]) -> tuple[Segment, ...]:
    """Cut a text at the prompt's sorted, disjoint spans; the segments joined are the text again."""
    segments = []
    position = 0
    for span in spans:
        segments += [Segment(text[position : span.start], True), Segment(text[span.start : span.end], False)]
        position = span.end
    segments.append(Segment(text[position:], True))
    return tuple(segment for segment in segments if segment.text)


def segment_document(text: str, is_python: bool) -> tuple[Segment, ...]:
    """Apply the rule for Python source, or the one for prose; source that does not parse is prose as well."""
    if not is_python:
        return split_segments(text, prose_prompt_spans(text))
    try:
        spans = python_prompt_spans(text)
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        spans = prose_prompt_spans(text)  # Python 2, a template, a parser's test: still text to learn from
    return split_segments(text, spans)


def _files_below(directory: Path, skip: Callable[[str], bool]) -> list[Path]:
    """List the files below a directory in sorted order, without files and directories whose name is to be skipped."""
    files = []
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not skip(name)]
        files += [Path(parent, name) for name in names if not skip(name)]
    return sorted(path for path in files if path.is_file())


def standard_library_files() -> list[Path]:
    """List the source files of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _files_below(root, NOT_STANDARD_LIBRARY.__contains__) if path.suffix == ".py"]
    if not files:
        raise InputError(f"the standard library has no source files in {root}; give your own text with --text")
    return files


def _directory_files(directory: Path) -> list[Path]:
    """List the files below a directory, leaving out hidden ones such as a version control system's."""
    return _files_below(directory, lambda name: name.startswith("."))


def _read(path: Path, max_characters: int) -> str:
    """Read a file as text with "\\n" line ends: Python source in its declared encoding, other text up to a limit.

    Source is read whole, for cut anywhere it would not parse. Raises OSError where it may not be read, SyntaxError or
    ValueError where it is not text.
    """
    if path.suffix in PYTHON_SUFFIXES:
        with tokenize.open(path) as file:
            text = file.read()
    else:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(max_characters)
    if "\0" in text:
        raise ValueError("holds NUL characters")
    return text


def _read_named(path: Path, max_characters: int) -> str:
    """Read a file the user named, where being unreadable or empty is their mistake and not a file to pass over."""
    try:
        text = _read(path, max_characters)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path} is not text (UTF-8, or Python source in its declared encoding)") from error
    if not text.strip():
        raise InputError(f"{path} is empty")
    return text


def _find_files(paths: Sequence[Path]) -> tuple[list[Path], set[Path]]:
    """List the files to read, and which of them the user named one by one."""
    found: list[Path] = []
    named: set[Path] = set()
    for path in paths:
        if path.is_dir():
            files = _directory_files(path)
            if not files:
                raise InputError(f"directory {path} holds no files")
            found += files
        elif path.is_file():
            if not path.stat().st_size:
                raise InputError(f"{path} is empty")
            named.add(path)
            found.append(path)
        else:
            raise InputError(f"{'not a' if path.exists() else 'no such'} file or directory: {path}")
    return list(dict.fromkeys(found)), named


def load_corpus(paths: Sequence[Path], max_characters: int, seed: int) -> Corpus:
    """Read files and directories, in an order shuffled by the seed, until `max_characters` are read.

    No path at all means the standard library. Raises InputError for a path that is missing, unreadable or empty.
    """
    try:
        order, named = _find_files(paths) if paths else (standard_library_files(), set())
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    random.Random(seed).shuffle(order)

    documents = []
    remaining = max_characters
    skipped = 0
    for path in order:
        if remaining <= 0:
            break
        try:
            text = _read_named(path, remaining) if path in named else _read(path, remaining)
        except (OSError, SyntaxError, ValueError):
            skipped += 1
            continue
        if text.strip():
            documents.append(segment_document(text, path.suffix in PYTHON_SUFFIXES))
            remaining -= len(text)
    if not documents:
        places = ", ".join(map(str, paths))
        raise InputError(f"no text in {places}: all files are empty or not UTF-8")
    return Corpus(tuple(documents), skipped)
