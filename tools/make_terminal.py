"""Draws docs/demo-light.svg and docs/demo-dark.svg: a terminal with what `make demo` prints while a label changes.

A test runs the demo again, and compares the pictures with it.
"""

import re
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOST = "2xA10-sriov"
FIRST, LAST = "The label requests other vGPUs", "What to try next"
"""The title of the first section that is shown, and of the first one after it."""
PALETTES = {
    "light": {"paper": "#f6f8fa", "frame": "#d0d7de", "ink": "#1f2328", "title": "#0969da", "typed": "#1a7f37"},
    "dark": {"paper": "#151b23", "frame": "#3d444d", "ink": "#e6edf3", "title": "#4493f8", "typed": "#3fb950"},
}
COLUMNS = 80
CHARACTER, LINE, MARGIN = 8.4, 18, 16
"""The width and the height of a character at 14 pixels, in any monospaced font (`textLength`); the border's width."""
ABOUT = (
    "What gpuvirt prints in its demo: a label requests other vGPUs while a VM uses one, which stays until the VM ends"
)


def file_of(theme: str) -> Path:
    """Return the picture of a theme."""
    return ROOT / f"docs/demo-{theme}.svg"


def shown() -> list[str]:
    """Run the demo; return the lines of the picture; raise CalledProcessError, or ValueError."""
    command = ["/usr/bin/env", f"COLUMNS={COLUMNS}", sys.executable, "-m", "gpuvirt", "demo", "--host", HOST]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    titles = {line.partition(". ")[2]: line for line in output.splitlines() if re.match(r"\d+\. ", line)}
    if not {FIRST, LAST} <= titles.keys():
        raise ValueError(f"the demo has no sections {FIRST!r} and {LAST!r}")
    text = output[output.index(titles[FIRST]) : output.index(titles[LAST])].rstrip()
    return [f"$ make demo HOST={HOST}", "...", *text.splitlines()]


def drawn(lines: list[str], theme: str) -> str:
    """Return the picture of a terminal with the lines."""
    colours = PALETTES[theme]
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    texts = []
    for number, line in enumerate(lines):
        kind = "typed" if line.startswith("$ ") else "title" if re.match(r"\d+\. ", line) else "ink"
        for words in re.finditer(r"\S+(?: \S+)*", line):  # a browser joins spaces, so columns are placed one by one
            length = f'textLength="{len(words[0]) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            place = f'x="{MARGIN + words.start() * CHARACTER:.1f}" y="{MARGIN + number * LINE + 13}" {length}'
            texts.append(f'<text {place} fill="{colours[kind]}">{escape(words[0], quote=False)}</text>')
    size = f'width="{width:.0f}" height="{height}"'
    fonts = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"
    frame = f'rx="8" fill="{colours["paper"]}" stroke="{colours["frame"]}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{fonts}" font-size="14" role="img">'
    box = f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" {frame}/>'
    return "\n".join([head, f"<title>{ABOUT}</title>", box, *texts, "</svg>\n"])


if __name__ == "__main__":
    LINES = shown()
    for name in PALETTES:
        file_of(name).write_text(drawn(LINES, name))
