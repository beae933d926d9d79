"""Fits a text into one line of the controller's log: it cuts the observed values before the problem and its fix."""

from gpuvirt.plain import one_line

MOST_LOGGED = 400
"""The most characters of a write, an error or a reason in the log: a whole line stays below 500."""
_CUT = "..."
_SEEN, _FIX = "; seen: ", "; fix: "


def logged(text: str) -> str:
    """Return a text, such as a reason's, on one line of the log."""
    line = " ".join(text.split())
    problem, seen, rest = line.partition(_SEEN)
    evidence, has_fix, fix = rest.rpartition(_FIX)
    if len(line) <= MOST_LOGGED or not (seen and has_fix):
        return one_line(line, MOST_LOGGED)
    room = MOST_LOGGED - len(problem) - len(_SEEN) - len(_CUT) - len(_FIX) - len(fix)
    shown = f"{_SEEN}{evidence[:room]}{_CUT}" if room > 0 else ""
    return one_line(f"{problem}{shown}{_FIX}{fix}", MOST_LOGGED)
