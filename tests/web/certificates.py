"""Certificates for tests that use TLS: an authority, a server, and clients, created by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; all files are in one folder."""

    def __init__(self, folder: Path, own: Pair | None = None) -> None:
        """`own` is the authority's certificate; without it, a new one is created."""
        self._folder = folder
        own = own or self._made("authority", "/CN=authority")
        self.certificate, self._key = own.certificate, own.key

    def server(self, name: str, *, alternatives: str) -> Pair:
        """Create a server's certificate; `alternatives` is like `DNS:api.example,IP:127.0.0.1`."""
        return self._made(name, f"/CN={name}", *self._signed, "-addext", f"subjectAltName={alternatives}")

    def client(self, user: str, group: str = "") -> Pair:
        """Create a user's certificate."""
        return self._made(user, f"{f'/O={group}' if group else ''}/CN={user}", *self._signed)

    @property
    def _signed(self) -> tuple[str, ...]:
        # Some servers refuse a certificate of their own that could sign others.
        return ("-CA", str(self.certificate), "-CAkey", str(self._key), "-addext", "basicConstraints=critical,CA:FALSE")

    def _made(self, name: str, subject: str, *more: str) -> Pair:
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files = ("-keyout", str(pair.key), "-out", str(pair.certificate))
        command = ["openssl", "req", "-x509", *_KEY, *files, "-subj", subject, "-days", "2", *more]
        subprocess.run(command, check=True, capture_output=True)
        return pair
