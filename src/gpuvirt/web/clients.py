"""The clients that an HTTPS server knows: those with a certificate of its CA, and with a permitted name.

The names of a certificate are its common name, and its DNS names and URIs.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec


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
    """The names of its verified certificate."""


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
