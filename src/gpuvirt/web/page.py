"""A page for probes or metrics, and its answer."""

from collections.abc import Callable

import msgspec

TEXT = "text/plain; charset=utf-8"


class PageAnswer(msgspec.Struct, frozen=True):
    """The response of a page."""

    status: int
    body: str
    content_type: str = TEXT


Page = Callable[[], PageAnswer]
