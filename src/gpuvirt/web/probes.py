"""Serves the pages `/metrics`, `/healthz` and `/readyz` to the kubelet's probes and to Prometheus."""

import logging
from collections.abc import Mapping

from gpuvirt.web.exposition import Page, PageAnswer
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest, HttpServer

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 8192
"""Probes have no body."""


class Probes:
    """Serves pages over HTTP."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._server = HttpServer(self._answer, most_body_bytes=MOST_BODY_BYTES)

    @property
    def port(self) -> int | None:
        """The port of the server; None before it listens."""
        return self._server.port

    async def run(self, host: str, port: int) -> None:
        """Serve at an address until cancelled; raises CannotListenError."""
        await self._server.run(host, port, about="metrics and probes")

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        try:
            answer = self.respond(request.method, request.path)
        except Exception:
            log.exception("a metrics or probe page failed")  # only this response fails: probes use the other pages
            answer = PageAnswer(500, f"{request.path} failed; the log says why\n")
        allow = "GET, HEAD" if answer.status == 405 else ""
        # One response for each connection: no probe reaches a process that has lost the address.
        return HttpAnswer(answer.status, answer.body.encode(), answer.content_type, closes=True, allow=allow)

    def respond(self, method: str, path: str) -> PageAnswer:
        """Return the answer of a page."""
        page = self._pages.get(path)
        if page is None:
            return PageAnswer(404, f"no such page; pages are {', '.join(self._pages)}\n")
        if method not in {"GET", "HEAD"}:
            return PageAnswer(405, "only GET and HEAD are supported\n")
        return page()
