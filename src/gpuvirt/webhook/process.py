"""The process of the admission webhook. Replicas need no leader: each answers by its config alone."""

import asyncio
from functools import partial
from pathlib import Path

import msgspec

from gpuvirt.clock import Clock, RealClock
from gpuvirt.tasks import keep_going, until_stopped
from gpuvirt.web.certificates import CertificateFiles, Handshakes, ServerCertificate
from gpuvirt.web.httpserver import HttpServer
from gpuvirt.web.probes import Probes
from gpuvirt.webhook.config import WebhookConfig
from gpuvirt.webhook.pages import MOST_BODY_BYTES, WebhookPages

DRAIN_S = 5.0
"""How long requests are still answered after a signal to end, until all nodes know that the replica is not ready."""
REQUEST_S = 10.0
"""How long a request may take to arrive; the API server waits as long for the answer at most by the chart's values."""


class WebhookOptions(msgspec.Struct, frozen=True):
    """The options of the process."""

    config: Path
    """The file of the config."""
    listen: tuple[str, int]
    """The address at which the API server asks."""
    metrics_listen: tuple[str, int] | None = None
    """The address of metrics and probes."""
    tls: CertificateFiles | None = None
    """None: HTTP, for a proxy that has the certificate; the API server speaks HTTPS alone."""
    clock: Clock = msgspec.field(default_factory=RealClock)
    drain_s: float = DRAIN_S


class WebhookProcess:
    """The process of one webhook."""

    def __init__(self, options: WebhookOptions) -> None:
        """Read the files; raise ConfigError for the certificate. An invalid config is reported instead."""
        self._options = options
        self._certificate = ServerCertificate(options.tls) if options.tls is not None else None
        handshakes = self._certificate.handshakes if self._certificate is not None else Handshakes()
        self.config = WebhookConfig(options.config)
        self.pages = WebhookPages(self.config, options.clock, handshakes)
        self.server = HttpServer(self.pages.answer, options.clock, request_s=REQUEST_S, most_body_bytes=MOST_BODY_BYTES)
        self.probes = Probes(self.pages.pages())

    async def run(self) -> None:
        """Serve until cancelled; then the process answers for a while, and is not ready any more."""
        options, certificate = self._options, self._certificate
        context = certificate.context if certificate is not None else None
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.server.run(*options.listen, context)),
                group.create_task(self.config.follow(options.clock)),
            ]
            if certificate is not None:
                tasks.append(group.create_task(certificate.follow(options.clock)))
            if (metrics := options.metrics_listen) is not None:
                serve = partial(self.probes.run, *metrics)
                tasks.append(group.create_task(keep_going("probes", serve, options.clock)))
            try:
                await asyncio.Event().wait()
            finally:
                self.pages.begin_to_end()
                if not any(task.done() for task in tasks):
                    await options.clock.sleep(options.drain_s)
                for task in tasks:
                    task.cancel()


async def run_until_stopped(options: WebhookOptions) -> None:
    """Run the webhook until SIGTERM or SIGINT."""
    await until_stopped(WebhookProcess(options).run())
