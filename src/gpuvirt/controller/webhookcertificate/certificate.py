"""Certificates in PEM: as OpenSSL reads them, and whether a key belongs to one. Keys are never on a disk."""

import os
import re
import ssl
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class _Decoded(msgspec.Struct, rename="camel"):
    """A certificate in the form of the ssl module."""

    not_before: str
    not_after: str
    subject_alt_name: tuple[tuple[str, object], ...] = ()


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
    certificates = list[Certificate]()
    for block in _BLOCK.findall(content):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with suppress(ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=block.decode("ascii"))
        for decoded in msgspec.convert(context.get_ca_certs(), list[_Decoded]):
            names = frozenset(str(value) for kind, value in decoded.subject_alt_name if kind == "DNS")
            begins, ends = (
                datetime.fromtimestamp(ssl.cert_time_to_seconds(written), UTC)
                for written in (decoded.not_before, decoded.not_after)
            )
            certificates.append(Certificate(block + b"\n", names, begins, ends))
    return tuple(certificates)


def pair_of(certificate: bytes, key: bytes) -> Pair | None:
    """Return the first certificate with its key; None if there is none, or if the key belongs to another."""
    certificates = certificates_in(certificate)
    if not certificates:
        return None
    # OpenSSL's function takes a file; this one is in no folder.
    with os.fdopen(os.memfd_create("gpuvirt"), "wb", buffering=0) as file:
        file.write(certificates[0].pem + key)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except (ssl.SSLError, ValueError):
            return None
    return Pair(certificates[0], key)
