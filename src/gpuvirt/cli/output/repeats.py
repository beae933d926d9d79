"""The reasons that an output has had already, so that each is printed once."""

import re

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
