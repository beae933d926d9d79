"""The certificate of an HTTPS server, and the CA and the names of its clients; its files are read again when changed.

Each version is loaded into a context of its own, and new connections get the last one that could be loaded whole.
OpenSSL drops a context's key when a certificate is loaded that does not match it: loading half a pair into the context
in use would end TLS.
"""

import logging
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
from typing_extensions import override

from gpuvirt.clock import Clock
from gpuvirt.errors import ConfigError


class ClientStanding(StrEnum):
    """The standing of a client, by its certificate."""

    PERMITTED = "permitted"
    """It has a certificate of the CA, and a permitted name."""
    OTHER_NAME = "other-name"
    """It has a certificate of the CA, and no permitted name."""
    NO_CERTIFICATE = "none"


class ServedClient(msgspec.Struct, frozen=True):
    """The client of a connection."""

    standing: ClientStanding = ClientStanding.NO_CERTIFICATE
    names: tuple[str, ...] = ()
    """The names of its verified certificate: its common name, and its DNS names and URIs."""


UNKNOWN = ServedClient()


class ClientRules(msgspec.Struct, frozen=True):
    """The certificates that clients need."""

    authority: Path
    """The file of the CA, in PEM; it may have several, such as the previous one."""
    names: frozenset[str] = frozenset()
    """The permitted names; every certificate of the CA is permitted if there are none."""
    required: bool = True
    """Whether other clients are refused; otherwise they are answered, and counted."""

    def judge(self, certificate: Mapping[str, object] | None) -> ServedClient:
        """Return the client with a verified certificate, in the form of `SSLSocket.getpeercert`."""
        if not certificate:
            return UNKNOWN
        names = tuple(_names(certificate))
        permitted = not self.names or not self.names.isdisjoint(names)
        return ServedClient(ClientStanding.PERMITTED if permitted else ClientStanding.OTHER_NAME, names)


def _names(certificate: Mapping[str, object]) -> Iterable[str]:
    subject, alternatives = certificate.get("subject"), certificate.get("subjectAltName")
    parts = [pair for part in subject for pair in part] if isinstance(subject, tuple) else []
    yield from (value for key, value in parts if key == "commonName")
    if isinstance(alternatives, tuple):
        yield from (value for key, value in alternatives if key in {"DNS", "URI"})


log = logging.getLogger(__name__)

_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""No failures, or clients that went away."""


class Handshakes:
    """The failed handshakes of a server's contexts: the client gets the alert, and the server counts and logs it.

    asyncio does neither: it closes the connection without the alert, so that the client only sees that it ended.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """By the reason in OpenSSL's words."""

    def observe(self, context: ssl.SSLContext) -> None:
        """Count the failures of a context's connections, and send their alerts."""
        handshakes = self

        class Observed(ssl.SSLObject):
            _failure: ssl.SSLError | None = None

            @override
            def do_handshake(self) -> None:
                if self._failure is not None:
                    raise self._failure
                try:
                    super().do_handshake()
                except _WAITS:
                    raise
                except ssl.SSLError as error:
                    handshakes.observe_error(error)
                    self._failure = error
                    # asyncio then sends what OpenSSL has written, the alert, and waits until the client has closed.
                    raise ssl.SSLWantReadError from error

        context.sslobject_class = Observed

    def observe_error(self, error: ssl.SSLError) -> None:
        """Count a failure, and log the first, the tenth, the hundredth of each kind."""
        reason = (error.reason or "unknown").lower().replace("_", " ")
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = f"{reason}: {error.verify_message}"
        self.failed[reason] += 1
        times = self.failed[reason]
        if str(times).rstrip("0") == "1":
            log.warning("a client was refused by TLS: %s", reason, extra={"times": times})


CHECK_S = 10.0
"""How often the files are looked at. The kubelet takes up to a minute to change the files of a Secret."""


class CertificateFiles(msgspec.Struct, frozen=True):
    """The files of a certificate, with those that it is signed by, and of its key; both in PEM."""

    certificate: Path
    key: Path
    clients: ClientRules | None = None
    """The certificates of clients; None if no client needs one."""

    def load(self) -> ssl.SSLContext:
        """Return a server's context with the certificate; raise ConfigError."""
        context = self.new_context()
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.certificate} with {self.key} cannot be used: {error}; expected a certificate and its own key,"
                " in PEM",
                where="--tls-cert, --tls-key",
            ) from error
        self._expect_clients(context)
        return context

    def new_context(self) -> ssl.SSLContext:
        """Return a server's context that asks clients for certificates according to the rules."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if self.clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED if self.clients.required else ssl.CERT_OPTIONAL
            # A client that resumes a session is not verified again, so that a CA that was taken away would still count.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def _expect_clients(self, context: ssl.SSLContext) -> None:
        if self.clients is None:
            return
        try:
            context.load_verify_locations(self.clients.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.clients.authority} cannot be used: {error}; expected the certificate of a CA, in PEM",
                where="--client-ca",
            ) from error

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return what changes with each file: its inode, and the time of its last change. Raises OSError."""
        files = (self.certificate, self.key, *((self.clients.authority,) if self.clients is not None else ()))
        return tuple((status.st_ino, status.st_mtime_ns) for status in map(Path.stat, files))


class ServerCertificate:
    """The certificate that new connections get."""

    def __init__(self, files: CertificateFiles) -> None:
        """Load the files; raise ConfigError."""
        self.handshakes = Handshakes()
        self.context = files.new_context()
        """The context of the server; it passes each connection on to the last version."""
        self.context.sni_callback = self._choose
        self.handshakes.observe(self.context)
        self._files = files
        self._tried = _versions(files)
        self._current = files.load()

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a connection its certificate; OpenSSL asks at each handshake, also where the client names no server."""
        connection.context = self._current

    async def follow(self, clock: Clock) -> None:
        """Read the files again when they change, until cancelled."""
        while True:
            await clock.sleep(CHECK_S)
            self.read_again()

    def read_again(self) -> None:
        """Load the files if they have changed; keep the previous certificate if they cannot be used, and log why."""
        found = _versions(self._files)
        if found == self._tried:
            return
        self._tried = found
        try:
            self._current = self._files.load()
        except ConfigError as error:
            log.warning("the certificate cannot be read again; the previous one is used: %s", error)
        else:
            log.info("the certificate has changed", extra={"file": self._files.certificate})


def _versions(files: CertificateFiles) -> tuple[tuple[int, int], ...]:
    """Return the versions of the files; empty if one of them is not there."""
    try:
        return files.versions()
    except OSError:
        return ()
