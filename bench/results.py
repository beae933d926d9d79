"""Figures by measurement and program, and their table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Results:
    """Figures, each with its unit in its name."""

    verbose: bool = False
    """Whether each figure is also printed to standard error at once."""
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, whose: str, what: str, value: float) -> None:
        """Add a figure."""
        self.rows.setdefault(what, {})[whose] = value
        if self.verbose:
            print(f"{whose}: {what}: {value:.3g}", file=sys.stderr)

    def table(self, columns: Sequence[str]) -> str:
        """Return the figures as a Markdown table: a column for each program, and the first one's ratios to others."""
        first, *others = [name for name in columns if any(name in row for row in self.rows.values())]
        head = ["", first, *(title for other in others for title in (other, f"{first} / {other}"))]
        lines = [_line(head), _line(["---"] * len(head))]
        for what, row in self.rows.items():
            value, beside = row.get(first), [row.get(other) for other in others]
            cells = [
                what,
                _figure(value),
                *(cell for other in beside for cell in (_figure(other), _ratio(value, other))),
            ]
            lines.append(_line(cells))
        return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value is not None and other else ""
