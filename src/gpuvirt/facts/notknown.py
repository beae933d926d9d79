"""The base of all values that stand for something unknown: they have no truth value.

`users or ()` and `if users` would take unknown for absent without a word. With these types they raise TypeError, and
`make lint` (tools/check_unknown.py) finds them before.
"""

from typing import NoReturn


class NotKnown:
    """A value that stands for something unknown. A decision asks for it by `isinstance` or `match`."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        """Raise TypeError: unknown is neither true nor false."""
        raise TypeError(f"{self!r} is unknown, which is neither true nor false; ask for it by isinstance")
