"""Certificates in PEM: as OpenSSL reads them, whether a key belongs to one, and how a new one is issued.

The program openssl issues them, since Python's standard library signs none, and the library cryptography would take
16 MiB of the controller's memory for a signature in two months. A certificate is its own authority, so that
no key exists which could sign another one. Keys are never on a disk.
"""

import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec

from gpuvirt.errors import GpuvirtError

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

OPENSSL = "openssl"
WITHIN_S = 30.0
_REQUEST = """[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = {subject}
[extensions]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,digitalSignature,keyCertSign
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
subjectAltName = DNS:{name}
"""
_MOST_SUBJECT = 64
"""The characters of a common name; servers are known by their alternative names, which may be longer."""


class NotIssuedError(GpuvirtError):
    """No certificate could be issued; the text has the reason."""


class Certificate(msgspec.Struct, frozen=True):
    """A certificate that is its own authority."""

    pem: bytes
    names: frozenset[str]
    """The DNS names of the server."""
    begins: datetime
    ends: datetime

    def serves(self, name: str, now: datetime) -> bool:
        """Return whether clients accept the certificate for a name now."""
        return name in self.names and self.begins <= now < self.ends


class Pair(msgspec.Struct, frozen=True):
    """A certificate with its key."""

    certificate: Certificate
    key: bytes


def certificates_in(content: bytes) -> tuple[Certificate, ...]:
    """Return the certificates in PEM that are authorities, without others."""
    found = (_read(block) for block in _BLOCK.findall(content))
    return tuple(certificate for certificate in found if certificate is not None)


def _read(block: bytes) -> Certificate | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=block.decode("ascii"))
    except (ssl.SSLError, ValueError):
        return None
    for found in context.get_ca_certs():
        alternatives = found.get("subjectAltName", ())
        pairs = [entry for entry in alternatives if isinstance(entry, tuple) and len(entry) == 2]
        names = frozenset(str(value) for kind, value in pairs if kind == "DNS")
        return Certificate(block + b"\n", names, _time(found.get("notBefore")), _time(found.get("notAfter")))
    return None


def _time(text: object) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(text)), UTC)


def pair_of(certificate: bytes, key: bytes) -> Pair | None:
    """Return a certificate with its key; None if there is none, or if the key belongs to another."""
    found = certificates_in(certificate)
    if not found or not _belong(found[0].pem, key):
        return None
    return Pair(found[0], key)


def _belong(certificate: bytes, key: bytes) -> bool:
    # OpenSSL's functions take files; these exist in memory alone.
    with _in_memory(certificate) as first, _in_memory(key) as second:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(first, second)
        except (ssl.SSLError, ValueError):
            return False
    return True


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file with a content that is in no folder."""
    descriptor = os.memfd_create("gpuvirt")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def issue(name: str, days: int) -> Pair:
    """Return a new certificate for a server's DNS name, which is valid from now on; raise NotIssuedError."""
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", str(days), "-config", "/dev/stdin", "-keyout", "-", "-out", "-"]
    request = _REQUEST.format(subject=name[:_MOST_SUBJECT], name=name).encode()
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=WITHIN_S, check=False)
    except FileNotFoundError as error:
        raise NotIssuedError(f"the program {OPENSSL} is not installed; gpuvirt's image has it") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotIssuedError(f"{OPENSSL} can't be run: {error}") from error
    # Its output has the key, so only its errors may be shown.
    key, begin, certificate = done.stdout.partition(b"-----BEGIN CERTIFICATE-----")
    pair = pair_of(begin + certificate, key)
    if done.returncode or pair is None:
        detail = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        raise NotIssuedError(f"{OPENSSL} issued no certificate (exit status {done.returncode}): {detail}")
    return pair
