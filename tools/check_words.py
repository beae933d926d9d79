"""Finds words that must not return (tools/words.toml), in names and in texts; exits with 1 if it finds one."""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
NAMED = ("*.py",)
TEXTS = ("*.md", "*.py", "*.yaml", "*.tpl", "*.txt", "*.toml", "Makefile")
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
FIRST = re.compile(r"\s*([A-Za-z]+)\b")
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Except(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exception: words that are allowed in a file."""

    path: str
    words: tuple[str, ...]
    reason: str

    def covers(self, path: str, word: str) -> bool:
        """Return whether a word is allowed in a file."""
        return fnmatchcase(path, self.path) and any(fnmatchcase(word, pattern) for pattern in self.words)


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words by where they are looked for, each with its replacement."""

    names: dict[str, str]
    begins: dict[str, str]
    """Words that begin no docstring: a relative clause without its noun."""
    loops: dict[str, str]
    """Words that name no variable of a loop, of a comprehension or of a lambda."""
    public: dict[str, str]
    text: dict[str, str]
    phrases: tuple[str, ...]
    """Phrases of the field that have such a word, in texts."""
    exceptions: tuple[Except, ...]


def found(words: Words, path: str) -> Iterator[tuple[int, str, str]]:
    """Yield each of these words in a file: its line, the word, and its replacement."""
    text = (ROOT / path).read_text()
    if any(fnmatchcase(path, pattern) for pattern in NAMED):
        for part in PARTS.findall(Path(path).stem):
            if part.lower() in words.names:
                yield 1, part, words.names[part.lower()]
        yield from _in_names(words, path)
        tree = ast.parse(text)
        yield from _in_loops(words, tree)
        yield from _in_docstrings(words, tree)
    texts = {**words.public, **words.text}
    phrases, listed = ("|".join(map(re.escape, strings)) for strings in (words.phrases, texts))
    pattern = re.compile(rf"\b(?:(?i:{phrases})|({listed}))\b")
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, word, texts[word]) for word in pattern.findall(line) if word)


def _in_names(words: Words, path: str) -> Iterator[tuple[int, str, str]]:
    with (ROOT / path).open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                for part in PARTS.findall(token.string):
                    if (better := words.names.get(part.lower())) is not None:
                        yield token.start[0], token.string, better


def _in_docstrings(words: Words, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the words that begin docstrings, those of fields included, which Python does not keep."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = FIRST.match(node.value.value)
            if first is not None and first[1] in words.begins:
                yield node.lineno, first[1], words.begins[first[1]]


def _in_loops(words: Words, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, LOOPS):
            named = ((name.lineno, name.id) for name in ast.walk(node.target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Lambda):
            named = ((argument.lineno, argument.arg) for argument in node.args.args)
        else:
            continue
        yield from ((line, name, words.loops[name]) for line, name in named if name in words.loops)


def _tracked() -> list[str]:
    command = ["/usr/bin/env", "git", "ls-files"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    """Check the files that are named, else all that git tracks."""
    words = msgspec.convert(tomllib.loads((ROOT / "tools/words.toml").read_text()), Words)
    paths = sys.argv[1:] or _tracked()
    count = 0
    for path in paths:
        if not any(fnmatchcase(path, pattern) for pattern in TEXTS) or not (ROOT / path).is_file():
            continue
        for line, word, better in sorted(set(found(words, path))):
            if not any(exception.covers(path, word) for exception in words.exceptions):
                print(f"{path}:{line}: {word}: say {better}")
                count += 1
    if count:
        print(f"{count} words that tools/words.toml replaces")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
