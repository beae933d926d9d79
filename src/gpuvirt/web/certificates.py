"""The certificate of an HTTPS server, and the CA of its clients, which are read again when their files change.

Each version is loaded into a context of its own, and new connections get the last one that could be loaded whole.
OpenSSL drops a context's key when a certificate is loaded that does not match it: loading half a pair into the context
in use would end TLS.
"""

import logging
import ssl
from pathlib import Path

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.errors import ConfigError
from gpuvirt.web.clients import ClientRules
from gpuvirt.web.handshakes import Handshakes

log = logging.getLogger(__name__)

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
        """Read the files again when they change, for ever."""
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
