"""The extender's pages: the verbs of kube-scheduler, and at an address of their own probes and metrics."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from gpuvirt import __version__
from gpuvirt.clock import Clock
from gpuvirt.extender.extender import FAILED, MALFORMED, NOT_SERVING, VERBS, Extender, Requests, SchedulerAnswer, failed
from gpuvirt.web.clients import ClientRules, ClientStanding, ServedClient
from gpuvirt.web.exposition import CONTENT_TYPE, counter, gauge, histograms, text_of
from gpuvirt.web.handshakes import Handshakes
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest
from gpuvirt.web.page import PageAnswer as Page

log = logging.getLogger(__name__)

JSON = "application/json"
NOT_PERMITTED = "not-permitted"
"""The result of a request whose client has no permitted name in its certificate."""
MOST_LOGGED = 64
"""The most certificates that are logged because their names are not permitted."""
_TEXT = "text/plain; charset=utf-8"


class Served(Protocol):
    """A process whose pages are served."""

    @property
    def extender(self) -> Extender:
        """The extender of the process."""
        ...

    @property
    def missing(self) -> str | None:
        """Why the process is not ready; None once it is."""
        ...


class ExtenderPages(msgspec.Struct):
    """The pages of one process."""

    process: Served
    clock: Clock
    clients: ClientRules | None
    """The certificates that clients need."""
    handshakes: Handshakes
    requests: Requests = msgspec.field(default_factory=Requests)
    asked_by: Counter[ClientStanding] = msgspec.field(default_factory=Counter)
    """The requests by the certificates of their clients."""
    _unknown: set[tuple[str, ...]] = msgspec.field(default_factory=set)
    """The names of clients that were logged because they are not permitted."""

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer to a request at the address of the verbs."""
        verb = request.path.strip("/")
        if verb in VERBS:
            if request.method != "POST":
                return HttpAnswer(405, b"only POST is supported here\n", _TEXT, allow="POST")
            return await self._answer_verb(verb, request)
        pages = ", ".join(f"/{verb}" for verb in VERBS)
        return HttpAnswer(
            404, f"no such page; pages are {pages}; metrics and probes have another port\n".encode(), _TEXT
        )

    def pages(self) -> dict[str, Callable[[], Page]]:
        """Return the pages at the address of probes and metrics."""

        def healthz() -> Page:
            return Page(200, "ok\n")

        def readyz() -> Page:
            missing = self.process.missing
            return Page(200 if missing is None else 503, f"{missing or 'ok'}\n")

        def metrics() -> Page:
            return Page(200, self.metrics(), CONTENT_TYPE)

        return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}

    async def _answer_verb(self, verb: str, request: HttpRequest) -> HttpAnswer:
        began_s = self.clock.monotonic_s()
        answer = await self._answer(verb, request)
        self.requests.results[verb, answer.result] += 1
        self.requests.seconds[verb].observe(self.clock.monotonic_s() - began_s)
        # A connection is kept alive by kube-scheduler: it must not stay with a process that does not lead.
        return HttpAnswer(200, answer.body, JSON, closes=answer.result in {NOT_SERVING, NOT_PERMITTED})

    def _refusal(self, verb: str, client: ServedClient) -> SchedulerAnswer | None:
        """Return the answer to a client that is not permitted; None for others, and where certificates are optional."""
        rules = self.clients
        if rules is None:
            return None
        self.asked_by[client.standing] += 1
        if client.standing is ClientStanding.PERMITTED:
            return None
        has = f"a certificate for {', '.join(client.names) or 'no name'}" if client.names else "no certificate"
        expects = f"one for {', '.join(sorted(rules.names))}" if rules.names else f"one of the CA in {rules.authority}"
        if client.names not in self._unknown and len(self._unknown) < MOST_LOGGED:
            self._unknown.add(client.names)
            then = "it is refused" if rules.required else "it will be refused once certificates are required"
            log.warning("a client has %s; expected %s; %s", has, expects, then, extra={"verb": verb})
        if not rules.required:
            return None
        why = f"{verb}: the client has {has}; the extender expects {expects}; see --client-name"
        return failed(why, NOT_PERMITTED)

    async def _answer(self, verb: str, request: HttpRequest) -> SchedulerAnswer:
        if (refusal := self._refusal(verb, request.client)) is not None:
            return refusal
        if request.fault:
            return failed(f"{verb}: {request.fault}", MALFORMED)
        if request.content_type not in {"", JSON}:
            return failed(f"{verb}: the content type is {request.content_type}; expected {JSON}", MALFORMED)
        try:
            return await self.process.extender.answer(verb, request.body)
        except Exception as error:
            log.exception("a request failed", extra={"verb": verb})
            return failed(f"{verb}: the extender failed: {type(error).__name__}: {error}; its log has more", FAILED)

    def metrics(self) -> str:
        """Return the metrics page."""
        extender, requests = self.process.extender, self.requests
        answers = extender.missing is None
        return text_of(
            gauge("gpuvirt_extender_leads", "1 in the leading process.", (), [((), float(extender.leads))]),
            gauge("gpuvirt_extender_ready", "1 while requests are answered.", (), [((), float(answers))]),
            counter(
                "gpuvirt_extender_requests_total",
                "Requests of kube-scheduler, by verb and result.",
                ("verb", "result"),
                requests.results.items(),
            ),
            histograms(
                "gpuvirt_extender_request_seconds",
                "Duration of requests, by verb.",
                ("verb",),
                [((verb,), histogram) for verb, histogram in requests.seconds.items()],
            ),
            counter(
                "gpuvirt_extender_clients_total",
                "Requests of kube-scheduler, by the verification of the client's certificate.",
                ("certificate",),
                [((str(standing),), count) for standing, count in self.asked_by.items()],
            ),
            counter(
                "gpuvirt_extender_tls_refused_total",
                "Connections whose TLS handshake failed, by reason.",
                ("reason",),
                [((reason,), count) for reason, count in self.handshakes.failed.items()],
            ),
            _usage(extender) if extender.leads else (),
            gauge("gpuvirt_info", "The extender's version.", ("version",), [((__version__,), 1)]),
        )


def _usage(extender: Extender) -> Iterator[str]:
    totals = extender.index.totals()
    yield from gauge("gpuvirt_extender_nodes", "Nodes that share GPUs.", (), [((), totals.nodes)])
    yield from gauge("gpuvirt_extender_gpus", "GPUs that are shared.", (), [((), totals.gpus)])
    yield from gauge(
        "gpuvirt_extender_units",
        "Units of all shared GPUs.",
        ("state",),
        [(("capacity",), totals.capacity), (("free",), totals.free)],
    )
    yield from gauge(
        "gpuvirt_extender_pods",
        "Pods with units, by whether their GPUs are known.",
        ("gpus",),
        [(("known",), totals.pods - totals.unassigned), (("unknown",), totals.unassigned)],
    )
    yield from gauge(
        "gpuvirt_extender_bindings", "Bindings that are under way.", (), [((), float(extender.binder.writes.under_way))]
    )
