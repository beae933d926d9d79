"""A serial worker for simulated hosts whose reads and writes never block."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class InlineWorker:
    """Runs jobs in the calling thread."""

    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:  # noqa: ARG002
        return job()
