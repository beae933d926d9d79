"""Draws docs/flow-light.svg and docs/flow-dark.svg of docs/flow.dot with Graphviz; --check compares them with it.

Each picture has the digest of the source and of its palette, so that the check needs no Graphviz.
"""

import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from string import Template

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs/flow.dot"
PALETTES = {
    "light": {
        "ink": "#1f2328", "faint": "#57606a", "line": "#57606a", "paper": "#ffffff",
        "accent": "#0969da", "program": "#ddf4ff",
        "hardware": "#fff8c5", "hardwareline": "#9a6700", "guest": "#dafbe1", "guestline": "#1a7f37",
        "frame": "#d0d7de",
    },
    "dark": {
        "ink": "#e6edf3", "faint": "#9198a1", "line": "#9198a1", "paper": "#0d1117",
        "accent": "#4493f8", "program": "#121d2f",
        "hardware": "#272115", "hardwareline": "#d29922", "guest": "#12261e", "guestline": "#3fb950",
        "frame": "#3d444d",
    },
}  # fmt: skip
"""Colours of GitHub's themes, by which the text is readable on its background."""
ABOUT = "gpuvirt: desired state becomes steps on the kernel's files, and what is observed becomes devices of VMs"
_DIGEST = re.compile(r"<!-- source: ([0-9a-f]{64}) -->")


def file_of(theme: str) -> Path:
    """Return the picture of a theme."""
    return ROOT / f"docs/flow-{theme}.svg"


def source_of(theme: str) -> str:
    """Return the source with the colours of a theme."""
    return Template(SOURCE.read_text()).substitute(PALETTES[theme])


def drawn(source: str) -> str:
    """Return the picture of a source; raise CalledProcessError."""
    svg = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, check=True).stdout  # noqa: S607
    # Graphviz writes its version and a comment for each node.
    svg = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<title>.*?</title>\n?", "", svg)
    head, _, rest = svg.partition(">")
    return f'<!-- source: {_digest(source)} -->\n{head} role="img">\n<title>{ABOUT}</title>{rest}'


def _digest(source: str) -> str:
    return sha256(source.encode()).hexdigest()


def main() -> int:
    """Draw the pictures, or check that they are of the current source."""
    if "--check" not in sys.argv[1:]:
        try:
            pictures = {file_of(theme): drawn(source_of(theme)) for theme in PALETTES}
        except FileNotFoundError:
            print("dot is missing; install Graphviz: apt-get install graphviz", file=sys.stderr)
            return 1
        for file, picture in pictures.items():
            file.write_text(picture)
        return 0
    stale = []
    for theme in PALETTES:
        file = file_of(theme)
        found = _DIGEST.search(file.read_text()) if file.exists() else None
        if found is None or found[1] != _digest(source_of(theme)):
            stale.append(file)
    for file in stale:
        print(
            f"{file.relative_to(ROOT)} is not drawn from the current docs/flow.dot; run make picture", file=sys.stderr
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
