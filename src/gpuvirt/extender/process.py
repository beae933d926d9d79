"""The process of the scheduler extender: takes part in the election, and answers kube-scheduler while it leads."""

import asyncio
import gc
import logging
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from gpuvirt.clock import Clock, RealClock
from gpuvirt.extender.extender import Extender
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.pages import ExtenderPages
from gpuvirt.extender.route import Backend, RouteKeeper
from gpuvirt.facts.ids import Namespace, ObjectName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import Candidacy, Election, Terms, new_identity
from gpuvirt.shares.sharing import Sharing
from gpuvirt.tasks import keep_going, until_stopped
from gpuvirt.web.certificates import CertificateFiles, ServerCertificate
from gpuvirt.web.handshakes import Handshakes
from gpuvirt.web.httpserver import HttpServer
from gpuvirt.web.probes import Probes

log = logging.getLogger(__name__)

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
        """Serve and take part in the election, for ever.

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
