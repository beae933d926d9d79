"""The process of the scheduler extender: takes part in the election, and answers kube-scheduler while it leads."""

import asyncio
import gc
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gpuvirt.clock import Clock, RealClock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.election import Candidacy, Election, Terms, new_identity
from gpuvirt.cluster.extender.extender import Extender
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import Namespace
from gpuvirt.tasks import until_stopped
from gpuvirt.web.extenderpages import ExtenderPages
from gpuvirt.web.httpserver import HttpServer

log = logging.getLogger(__name__)

EXTENDER_LEASE = "gpuvirt-extender"
TERMS = Terms(duration_s=8, give_up_s=5.0, renew_s=1.0)
"""Another replica answers 10 s after the leader was killed, since pods wait for it."""
RELOAD_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of the server's certificate and key, which are read again when they change."""

    certificate: Path
    key: Path

    def load(self, context: ssl.SSLContext) -> None:
        """Read the files; raise ConfigError."""
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.certificate} with {self.key} cannot be used: {error}", where="--tls-cert"
            ) from error

    def versions(self) -> tuple[int, ...]:
        """Return the times of the last changes; raise OSError."""
        return tuple(file.stat().st_mtime_ns for file in (self.certificate, self.key))


@dataclass(frozen=True, slots=True)
class ExtenderOptions:
    """The options of the process."""

    credentials: Credentials
    namespace: Namespace
    """The namespace of the lease."""
    listen: tuple[str, int]
    sharing: Sharing = field(default_factory=Sharing)
    elects: bool = True
    """Whether several extenders elect a leader; otherwise this one leads at once."""
    tls: Tls | None = None
    clock: Clock = field(default_factory=RealClock)


class Process:
    """The process of one extender."""

    def __init__(self, options: ExtenderOptions, on_ready: Callable[[], None] = lambda: None) -> None:
        """`on_ready` is called when the nodes, the pods and the PodDisruptionBudgets are listed."""
        random = Random()  # noqa: S311  it spreads watches over time, and keeps no secrets
        self.term: Extender | None = None
        """The extender while this process leads; None while another process leads."""
        self._options = options
        self._on_ready = on_ready
        self._random = random
        candidacy = Candidacy(options.namespace, EXTENDER_LEASE, new_identity(random), TERMS)
        self._election = Election(Client(options.credentials), candidacy, options.clock, random)
        self.pages = ExtenderPages(self, options.clock)
        self.server = HttpServer(self.pages.answer)

    async def run(self) -> None:
        """Serve and take part in the election, for ever.

        When cancelled, the process finishes its bindings, releases its lease, and only then closes its connections.
        """
        options, context = self._options, self._context()
        host, port = options.listen
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.server.run(host, port, context))]
            if context is not None and options.tls is not None:
                tasks.append(group.create_task(_reload(options.tls, context, options.clock)))
            try:
                await (self._election.run(self._lead) if options.elects else self._lead())
            finally:
                for task in tasks:
                    task.cancel()

    async def _lead(self) -> None:
        client = Client(self._options.credentials, keeps=True)
        may_write: Callable[[], bool] = (lambda: self._election.may_write) if self._options.elects else (lambda: True)
        self.term = Extender(client, self._options.sharing, self._options.clock, self._random, may_write)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._announce(self.term))
                await self.term.run()
        finally:
            self.term = None
            client.close()

    async def _announce(self, term: Extender) -> None:
        """Log when the nodes, the pods and the PodDisruptionBudgets are listed."""
        clock = self._options.clock
        began_s = clock.monotonic_s()
        while not term.is_listed:
            await clock.sleep(0.1)
        self._on_ready()
        after_s, totals = round(clock.monotonic_s() - began_s, 1), term.index.totals()
        extra = {"after_s": after_s, "nodes": totals.nodes, "gpus": totals.gpus, "pods": totals.pods}
        log.info("answering requests", extra=extra)

    def _context(self) -> ssl.SSLContext | None:
        tls = self._options.tls
        if tls is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load(context)
        return context


def _leave_out_of_collections() -> None:
    """Spare the garbage collector the objects that are there now: it would go through all pods amid a request."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def _reload(tls: Tls, context: ssl.SSLContext, clock: Clock) -> None:
    """Read the certificate again when it has changed; new connections use it."""
    known = tls.versions()
    while True:
        await clock.sleep(RELOAD_EVERY_S)
        try:
            found = tls.versions()
            if found != known:
                tls.load(context)
                known = found
                log.info("the certificate has changed", extra={"file": tls.certificate})
        except (OSError, ConfigError) as error:
            log.warning("the certificate cannot be read again; the previous one is used: %s", error)


async def run_until_stopped(options: ExtenderOptions) -> None:
    """Run the extender until SIGTERM or SIGINT; it releases its lease, so that another replica leads at once."""
    await until_stopped(Process(options, _leave_out_of_collections).run())
