"""The blocks of README.md and docs/*.md that hold commands, and the commands in them.

A block is fenced, or indented by four spaces below a blank line. In a block with lines that begin with `$ `, these are
commands and the others are output. A fenced block that names a language other than console has no commands. Every other
block has commands alone. A comment before a block says `not run: REASON`, or `host: NAME after COMMAND`: the simulated
host on which the test runs it, and a command to run first, if any.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"( *)```(\w*)$")
COMMENT = re.compile(r"<!-- (not run|host): (.+) -->$")
OPERATORS = frozenset({"&&", "||", "|", ";", "&", "(", ")", ";;"})
ASSIGNMENT = re.compile(r"\w+=")
PROMPT = "$ "
CONSOLE = ("", "console")


class Block(msgspec.Struct, frozen=True):
    """A block of a page."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    not_run: str = ""
    """Why its commands can't be run by a test; empty otherwise."""
    host: str = ""
    first: str = ""
    """The command that the test runs first on that host."""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def has_prompts(self) -> bool:
        return any(line.startswith(PROMPT) for line in self.lines)

    def shell(self) -> Sequence[str]:
        """Return its command lines, without prompts; a line that ends in a backslash goes on."""
        if self.language not in CONSOLE:
            return ()
        if not self.has_prompts:
            return _joined(self.lines)
        found, goes_on = [], False
        for line in self.lines:
            if line.startswith(PROMPT) or goes_on:
                found.append(line.removeprefix(PROMPT))
                goes_on = line.endswith("\\")
        return _joined(found)

    def commands(self) -> Iterator[Sequence[str]]:
        """Yield the words of each simple command, without assignments before it and without redirections."""
        for line in _without_documents(self.shell()):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            yield from _simple(list(lexer))


def _joined(lines: Sequence[str]) -> Sequence[str]:
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def _without_documents(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines outside of here-documents."""
    end = None
    for line in lines:
        if end is None:
            yield line
            started = re.search(r"<<-?'?(\w+)", line)
            end = started[1] if started else None
        elif line.strip() == end:
            end = None


def _simple(words: Sequence[str]) -> Iterator[Sequence[str]]:
    command: list[str] = []
    skipped = False
    for word in (*words, ";"):
        if word in OPERATORS:
            if command:
                yield command
            command = []
        elif skipped or (not command and ASSIGNMENT.match(word)):
            skipped = False
        elif set(word) <= set("<>&"):
            skipped = True
        else:
            command.append(word)


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages."""
    for page in PAGES:
        yield from _blocks(str(page.relative_to(ROOT)), page.read_text().splitlines())


def _blocks(page: str, lines: Sequence[str]) -> Iterator[Block]:
    comment: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line, fence = lines[number], FENCE.match(lines[number])
        below = number
        if fence is not None:
            below = next(end for end in range(number + 1, len(lines)) if lines[end].strip() == "```")
            content = [text.removeprefix(fence[1]) for text in lines[number + 1 : below]]
            yield _block(page, number + 2, fence[2], content, comment)
        elif line.startswith("    ") and (number == 0 or not lines[number - 1]):
            while below < len(lines) and (not lines[below] or lines[below].startswith("    ")):
                below += 1
            while not lines[below - 1]:
                below -= 1
            content = list(lines[number:below])
            indent = min(len(text) - len(text.lstrip()) for text in content if text)
            yield _block(page, number + 1, "", [text[indent:] for text in content], comment)
            below -= 1
        if line.strip():
            comment = COMMENT.match(line.strip())
        number = below + 1


def _block(page: str, line: int, language: str, lines: Sequence[str], comment: re.Match[str] | None) -> Block:
    kind, value = (comment[1], comment[2]) if comment else ("", "")
    reason = value if kind == "not run" else ""
    host, _, first = value.partition(" after ") if kind == "host" else ("", "", "")
    return Block(page, line, language, tuple(lines), reason, host, first)
