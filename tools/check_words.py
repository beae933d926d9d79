"""Finds words that must not return (tools/words.toml), in names and in texts; exits with 1 if it finds one."""

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


def main() -> int:
    """Check all files that git tracks."""
    words = msgspec.convert(tomllib.loads((ROOT / "tools/words.toml").read_text()), Words)
    listed = subprocess.run(["/usr/bin/env", "git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    count = 0
    for path in listed.stdout.splitlines():
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
