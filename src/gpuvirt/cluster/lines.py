"""Lines of a body that arrives in pieces, which end where the network pleases."""

from collections.abc import Iterator

from gpuvirt.cluster.failures import NotUnderstoodError
from gpuvirt.cluster.transport import MOST_BYTES


class Lines:
    """Puts pieces together."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._begun: list[bytes] = []
        self._length = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete with `piece`, without their ends, and no empty ones.

        Raises NotUnderstoodError for a line that is longer than can be kept.
        """
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join((*self._begun, end))
            self._begun, self._length = [], 0
            if line.strip():
                yield line
        self._begun.append(rest)
        self._length += len(rest)
        if self._length > self._most_bytes:
            raise NotUnderstoodError(f"a line is longer than {self._most_bytes} bytes")
