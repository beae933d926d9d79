"""The formats of commands' output, and how a command that lists things is asked to print them."""

from enum import StrEnum

import msgspec


class Output(StrEnum):
    """The format of a command's output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class ListOutput(StrEnum):
    """The format of a list."""

    TABLE = "table"
    WIDE = "wide"
    """The table with all columns, a row on one line however long it is."""
    NAME = "name"
    """A name a line, which other commands take."""
    JSON = "json"
    YAML = "yaml"


class Layout(msgspec.Struct, frozen=True):
    """How much of a table, and of the text beside it, is printed."""

    wide: bool = False
    headings: bool = True
    """Without them, only the rows are printed: no second table, no reasons, no summary."""


class ListFormat(msgspec.Struct, frozen=True):
    """How a list is printed."""

    output: ListOutput = ListOutput.TABLE
    no_headers: bool = False

    @property
    def layout(self) -> Layout:
        """The layout of its tables."""
        return Layout(wide=self.output is ListOutput.WIDE, headings=not self.no_headers)

    @property
    def is_table(self) -> bool:
        """Whether it is printed as a table."""
        return self.output in {ListOutput.TABLE, ListOutput.WIDE}
