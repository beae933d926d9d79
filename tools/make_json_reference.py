"""Generates what docs/reference.md says of the JSON of commands; --check says if it is current."""

import sys
from pathlib import Path

from jsonshapes import markdown

REFERENCE = Path(__file__).parent.parent / "docs/reference.md"
BEGIN, END = "<!-- json: generated -->\n", "<!-- json: end -->\n"


def main() -> int:
    """Write the tables, or compare them."""
    before = REFERENCE.read_text()
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}{markdown()}{END}{rest.partition(END)[2]}"
    if before == after:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/reference.md: what it says of JSON is out of date; run make generate", file=sys.stderr)
        return 1
    REFERENCE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
