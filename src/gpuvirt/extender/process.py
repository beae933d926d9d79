"""The process of the scheduler extender: its election, the verbs that it answers while it leads, and its metrics."""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Protocol

import msgspec

from gpuvirt import __version__
from gpuvirt.clock import Clock, RealClock
from gpuvirt.extender.extender import FAILED, MALFORMED, NOT_SERVING, VERBS, Extender, Requests, SchedulerAnswer, failed
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.route import Backend, RouteKeeper
from gpuvirt.facts.ids import Namespace, ObjectName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import Candidacy, Election, Terms, new_identity
from gpuvirt.shares.sharing import Sharing
from gpuvirt.tasks import keep_going, until_stopped
from gpuvirt.web.certificates import (
    CertificateFiles,
    ClientRules,
    ClientStanding,
    Handshakes,
    ServedClient,
    ServerCertificate,
)
from gpuvirt.web.exposition import CONTENT_TYPE, counter, gauge, histograms, text_of
from gpuvirt.web.exposition import PageAnswer as Page
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest, HttpServer
from gpuvirt.web.probes import Probes

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
            began_s = self.clock.monotonic_s()
            answer = await self._answer(verb, request)
            self.requests.results[verb, answer.result] += 1
            self.requests.seconds[verb].observe(self.clock.monotonic_s() - began_s)
            # A connection is kept alive by kube-scheduler: it must not stay with a process that does not lead.
            return HttpAnswer(200, answer.body, JSON, closes=answer.result in {NOT_SERVING, NOT_PERMITTED})
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


EXTENDER_LEASE = "gpuvirt-extender"
TERMS = Terms(duration_s=8, give_up_s=5.0, renew_s=1.0)
"""Another replica answers 10 s after the leader was killed, since pods wait for it."""


class ServiceOptions(msgspec.Struct, frozen=True):
    """The Service of the extenders, and the addresses of this one."""

    name: ObjectName
    addresses: tuple[str, ...]


class ExtenderOptions(msgspec.Struct, frozen=True):
    """The options of the process."""

    credentials: Credentials
    namespace: Namespace
    """The namespace of the lease, and of the Service."""
    listen: tuple[str, int]
    """The address at which kube-scheduler asks."""
    metrics_listen: tuple[str, int] | None = None
    """The address of metrics and probes."""
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    elects: bool = True
    """Whether several extenders elect a leader; otherwise this one leads at once."""
    service: ServiceOptions | None = None
    """The Service that is to lead to this process while it leads; None where clients connect by themselves."""
    tls: CertificateFiles | None = None
    clock: Clock = msgspec.field(default_factory=RealClock)
    terms: Terms = TERMS
    """How long the lease lasts, and how often it is renewed."""
    intervals: ExtenderIntervals = INTERVALS


class ExtenderProcess:
    """The process of one extender."""

    def __init__(self, options: ExtenderOptions, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called each time that the process begins to answer requests. Raises ConfigError."""
        random = Random()  # noqa: S311  it spreads watches over time, and keeps no secrets
        self._options = options
        self._on_ready = on_ready
        self._me = new_identity(random)
        candidacy = Candidacy(options.namespace, EXTENDER_LEASE, self._me, options.terms)
        self._client = Client(options.credentials)
        self._election = Election(self._client, candidacy, options.clock, random)
        clock, every = options.clock, options.intervals
        self.extender = Extender(self._client, options.sharing, clock, random, self._may_write, every)
        self.route: RouteKeeper | None = None
        """Keeps the Service's route while this process leads and has a Service."""
        self._certificate = ServerCertificate(options.tls) if options.tls is not None else None
        clients = options.tls.clients if options.tls is not None else None
        handshakes = self._certificate.handshakes if self._certificate is not None else Handshakes()
        self.pages = ExtenderPages(self, options.clock, clients, handshakes)
        self.server = HttpServer(self.pages.answer, options.clock, clients)
        self.probes = Probes(self.pages.pages())

    @property
    def missing(self) -> str | None:
        """Why this process is not ready; None once it is.

        A standby is ready once it could take over. The leader is ready once it answers, and the Service leads to it.
        """
        if not self.extender.leads:
            return self.extender.unlisted
        return self.extender.missing or (self.route.missing if self.route is not None else None)

    async def run(self) -> None:
        """Serve and take part in the election, until cancelled.

        When cancelled, the process finishes its bindings, releases its lease, and only then closes its connections.
        """
        options, certificate = self._options, self._certificate
        host, port = options.listen
        async with asyncio.TaskGroup() as group:
            context = certificate.context if certificate is not None else None
            tasks = [group.create_task(self.server.run(host, port, context)), group.create_task(self.extender.run())]
            if certificate is not None:
                tasks.append(group.create_task(certificate.follow(options.clock)))
            if (metrics := options.metrics_listen) is not None:
                serve = partial(self.probes.run, *metrics)
                tasks.append(group.create_task(keep_going("probes", serve, options.clock)))
            try:
                await (self._election.run(self._lead) if options.elects else self._lead())
            finally:
                for task in tasks:
                    task.cancel()
                self._client.close()

    def _may_write(self) -> bool:
        return self._election.may_write or not self._options.elects

    async def _lead(self) -> None:
        """Answer requests, and have the Service lead here, until cancelled."""
        service, clock = self._options.service, self._options.clock
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.extender.lead())
                group.create_task(self._announce())
                if service is not None:
                    backend = Backend(service.name, service.addresses, self._me)
                    namespace, every = self._options.namespace, self._options.intervals
                    self.route = RouteKeeper(self._client, namespace, backend, clock, self._may_write, every)
                    group.create_task(self.route.keep(await self._port()))
        finally:
            self.route = None

    async def _port(self) -> int:
        """Return the port of the server once it listens."""
        while self.server.port is None:
            await self._options.clock.sleep(0.05)
        return self.server.port

    async def _announce(self) -> None:
        """Log when requests are answered."""
        clock = self._options.clock
        began_s = clock.monotonic_s()
        while self.extender.missing is not None:
            await clock.sleep(0.1)
        self._on_ready()
        after_s, totals = round(clock.monotonic_s() - began_s, 1), self.extender.index.totals()
        extra = {"after_s": after_s, "nodes": totals.nodes, "gpus": totals.gpus, "pods": totals.pods}
        log.info("answering requests", extra=extra)


def _leave_out_of_collections() -> None:
    """Freeze the cached objects, so that a collection during a request does not traverse all pods."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def run_until_stopped(options: ExtenderOptions) -> None:
    """Run the extender until SIGTERM or SIGINT; it releases its lease, so that another replica leads at once."""
    await until_stopped(ExtenderProcess(options, _leave_out_of_collections).run())
