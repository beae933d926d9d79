"""Tables and paragraphs as wide as the terminal; no cell and no word is ever cut.

A table that is too wide keeps its identifying columns. Its other columns go below the rows, rightmost first, with a
line for each cell that is not empty. In a pipe nothing is wrapped: a row is one line, and no cell of it is empty.
rich's own tables cut or fold cells within words, and nobody can copy or search for a broken name.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gpuvirt.cli.formats import Layout

SEPARATOR = " | "
_PART = re.compile(r"(?:[A-Z]\w+: )?(?:node (?P<node>\S+): )?(?:[A-Z]\w+: )?(?P<body>.*)", re.DOTALL)


class Repeats:
    """The reasons that an output has had, by node."""

    def __init__(self) -> None:
        """Make an empty one."""
        self._had: set[tuple[str, str]] = set()

    def fresh(self, text: str, node: str = "") -> str:
        """Return the reasons of a text that are new; the text may begin with codes, and name a node."""
        parts = []
        for part in text.split(SEPARATOR):
            match = _PART.fullmatch(part)
            node, body = (match["node"] or node, match["body"]) if match is not None else (node, part)
            if (node, body) not in self._had:
                self._had.add((node, body))
                parts.append(part)
        return SEPARATOR.join(parts)


Cell = Text | str

NOTHING = "-"
FALLBACK_WIDTH = 80
"""The width of a terminal that does not tell its own."""
FALLBACK_HEIGHT = 24
UNBOUNDED = 1_000_000
"""The width in a pipe without COLUMNS, and of a wide table."""
NARROWEST = 40
"""The least width; a narrower paragraph would have one word on a line."""
CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal."""
GAP = "  "
BELOW = "  "
"""The indent of a line below a row."""


class Column(msgspec.Struct, frozen=True):
    """One column of a table."""

    name: str
    folds: bool = False
    """Whether its cells go below their rows if the table is too wide."""
    optional: bool = False
    """Whether it is left out if it is empty in all rows."""
    wide: bool = False
    """Whether only wide tables have it."""


class _Row(msgspec.Struct, frozen=True):
    cells: tuple[Text, ...]
    below: tuple[str, ...]


class Table(msgspec.Struct):
    """A table whose layout fits the console that prints it."""

    columns: Sequence[Column]
    below: str = "REASON"
    """The column in which a row that is one line has the texts below it."""
    _rows: list[_Row] = msgspec.field(default_factory=list)

    def add(self, *cells: Cell, below: Iterable[str] = ()) -> None:
        """Add a row with a cell for each column; on a terminal the paragraphs `below` are printed below it."""
        texts = (cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        self._rows.append(_Row(tuple(_on_one_line(text) for text in texts), tuple(below)))

    def print(self, out: Console, layout: Layout = Layout()) -> None:  # noqa: B008  frozen
        """Print the table."""
        if lines := list(self.lines(out.width, layout)):  # one call: each takes a third of a millisecond
            out.print(Text("\n").join(lines), soft_wrap=True)

    def lines(self, width: int, layout: Layout = Layout()) -> Iterator[Text]:  # noqa: B008  frozen
        """Yield the lines of the table, its heading first."""
        if layout.wide or width >= UNBOUNDED:
            return self._whole().fitted(UNBOUNDED, layout)
        return self.fitted(width, layout)

    def _whole(self) -> "Table":
        """Return the table with its texts below rows as cells, and no empty cell."""
        names = [column.name for column in self.columns]
        extra = self.below not in names and any(row.below for row in self._rows)
        made = Table((*self.columns, Column(self.below)) if extra else self.columns)
        at = names.index(self.below) if self.below in names else len(names)
        for row in self._rows:
            cells = [*row.cells, Text()] if extra else list(row.cells)
            if row.below:
                cells[at] = Text("; ".join((*filter(None, (cells[at].plain,)), *row.below)))
            made.add(*(cell if cell.plain else NOTHING for cell in cells))
        return made

    def fitted(self, width: int, layout: Layout) -> Iterator[Text]:
        """Yield the lines of the table, in the columns that fit the width."""
        inside, folded = self._fit(width, layout)
        heads = {at: Text(self.columns[at].name, style="bold") for at in inside}
        widths = {at: self._width(at, layout) for at in inside}
        if layout.headings:
            yield _joined(heads, widths)
        for row in self._rows:
            yield _joined({at: row.cells[at] for at in inside}, widths)
            for at in folded:
                if not _is_empty(row.cells[at]):
                    head = Text.assemble(BELOW, (f"{self.columns[at].name}: ", "bold"))
                    yield from paragraph(row.cells[at], width, head=head)
            for text in row.below:
                yield from paragraph(text, width, head=BELOW)

    def _fit(self, width: int, layout: Layout) -> tuple[list[int], list[int]]:
        """Return the columns that stay in the rows, and those that go below them."""
        inside = [at for at in range(len(self.columns)) if self._is_shown(at, layout)]
        folded: list[int] = []
        while sum(self._width(at, layout) for at in inside) + len(GAP) * (len(inside) - 1) > width:
            last = next((at for at in reversed(inside) if self.columns[at].folds), None)
            if last is None:
                break
            inside.remove(last)
            folded.insert(0, last)
        return inside, folded

    def _is_shown(self, at: int, layout: Layout) -> bool:
        column = self.columns[at]
        if column.wide or layout.wide:
            return layout.wide
        return not column.optional or not all(_is_empty(row.cells[at]) for row in self._rows)

    def _width(self, at: int, layout: Layout) -> int:
        heading = cell_len(self.columns[at].name) if layout.headings else 0
        return max(heading, *(row.cells[at].cell_len for row in self._rows), 0)


def console() -> Console:
    """Return the console of standard output; texts of the host such as `[...]` and `:...:` are no markup."""
    return Console(width=terminal_width(), highlight=False, markup=False, emoji=False)


def terminal_width() -> int:
    """Return the width of the output: COLUMNS, the terminal's own width, or 80; in a pipe nothing has to fit."""
    unknown = FALLBACK_WIDTH if sys.stdout.isatty() else UNBOUNDED
    return max(shutil.get_terminal_size((unknown, 24)).columns, NARROWEST)


def terminal_height() -> int:
    """Return the height of the output: LINES, the terminal's own, or 24; in a pipe nothing has to fit."""
    unknown = FALLBACK_HEIGHT if sys.stdout.isatty() else UNBOUNDED
    return shutil.get_terminal_size((FALLBACK_WIDTH, unknown)).lines


def paragraph(text: Cell, width: int, *, head: Cell = "") -> Iterator[Text]:
    """Yield the lines of a text after a head: wrapped at spaces, and indented by the head's width."""
    first = head if isinstance(head, Text) else Text(head)
    indent, style = " " * first.cell_len, text.style if isinstance(text, Text) else ""
    words = printable(" ".join(str(text).split()))
    lines = textwrap.wrap(words, max(width, NARROWEST) - len(indent), break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        yield Text.assemble(first if number == 0 else indent, (line, style))


def say(out: Console, text: Cell, *, head: Cell = "", style: str = "") -> None:
    """Print a paragraph."""
    for line in paragraph(Text(text, style=style) if isinstance(text, str) else text, out.width, head=head):
        out.print(line, soft_wrap=True)


def printable(text: str) -> str:
    """Return a text without control characters, which a file may contain and a terminal would obey."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _on_one_line(text: Text) -> Text:
    plain = " ".join(text.plain.split())
    return text if plain == text.plain and plain.isprintable() else Text(printable(plain), style=text.style)


def _is_empty(cell: Text) -> bool:
    return cell.plain in {"", NOTHING}


def _joined(cells: dict[int, Text], widths: dict[int, int]) -> Text:
    line = Text()
    for at, cell in cells.items():
        line.append_text(cell)
        line.append(" " * (widths[at] - cell.cell_len) + GAP)
    line.rstrip()
    return line
