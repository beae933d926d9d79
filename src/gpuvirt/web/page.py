"""A page for probes or metrics, and its answer."""

from collections.abc import Callable
from dataclasses import dataclass

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a page."""

    status: int
    body: str
    content_type: str = TEXT


Page = Callable[[], Answer]
