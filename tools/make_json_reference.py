"""Generates the tables of JSON output in docs/reference/json.md; with --check, reports whether they are stale."""

import sys
from pathlib import Path

from jsonshapes import markdown

REFERENCE = Path(__file__).parent.parent / "docs/reference/json.md"
BEGIN, END = "<!-- json: generated -->\n", "<!-- json: end -->\n"


def main() -> int:
    """Write the tables, or compare them."""
    before = REFERENCE.read_text()
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}{markdown()}{END}{rest.partition(END)[2]}"
    if before == after:
        return 0
    if "--check" in sys.argv[1:]:
        print(
            "docs/reference/json.md: the tables of JSON output are not up to date; run make generate", file=sys.stderr
        )
        return 1
    REFERENCE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
