"""Decides the next step of the certificate's rotation, from the Secret and the webhook's configuration.

    issue the next certificate -> trust it, too -> serve it -> trust the previous one for a day -> forget it

Each state follows from the two objects and the time, so a controller may end after any step, and another goes on. The
webhook never serves a certificate before the API servers trust it, and they trust each while a replica may serve it.
"""

from datetime import datetime, timedelta

import msgspec

from gpuvirt.controller.webhookcertificate.certificate import Certificate, Pair

VALID_DAYS = 90
RENEW_BEFORE = timedelta(days=30)
"""How long before its end a certificate gets a successor."""
SETTLE = timedelta(minutes=5)
"""How long all API servers, and clocks that differ, have until the webhook serves the certificate that follows."""
OVERLAP = timedelta(days=1)
"""How long the previous certificate is trusted, until the kubelets have given the new one to all replicas."""


class Held(msgspec.Struct, frozen=True):
    """The certificates in the Secret; the empty value stands for a Secret that does not exist."""

    current: Pair | None = None
    """The pair that the webhook serves; None if it is missing, or if its key belongs to another certificate."""
    following: Pair | None = None
    """The pair that the webhook will serve."""
    previous: tuple[Certificate, ...] = ()
    """The certificates that a replica may still serve."""


class Issue(msgspec.Struct, frozen=True):
    """Issue a certificate: as the current one, or to follow it."""

    follows: bool
    previous: tuple[Certificate, ...] = ()
    """For a current one: what replicas may still serve."""


class Trust(msgspec.Struct, frozen=True):
    """Have the API server trust these certificates, and no others."""

    certificates: tuple[Certificate, ...]


class Promote(msgspec.Struct, frozen=True):
    """Serve the following certificate; the current one becomes the previous one."""


class Forget(msgspec.Struct, frozen=True):
    """Trust the previous certificates no more."""


Step = Issue | Trust | Promote | Forget


def next_step(held: Held, trusted: tuple[Certificate, ...] | None, name: str, now: datetime) -> Step | None:
    """Return the next step; None while there is nothing to do.

    `trusted` is the CA in the webhook's configuration, None without a configuration. `name` is the server's name.
    """
    current = held.current.certificate if held.current is not None else None
    following = held.following.certificate if held.following is not None else None
    if following is not None and not following.serves(name, now):
        following = None
    if current is None or not current.serves(name, now):
        # Replicas still serve what they have read last, which the API server trusts.
        kept = (*held.previous, *(trusted or ()), *((current,) if current is not None else ()))
        return Issue(follows=False, previous=_valid(kept, name, now))
    desired = _distinct((current, *((following,) if following is not None else ()), *_valid(held.previous, name, now)))
    if trusted is not None and trusted != desired:
        return Trust(desired)
    if following is not None:
        is_settled = trusted is not None and now >= following.begins + SETTLE
        return Promote() if is_settled else None
    if held.previous and now >= current.begins + OVERLAP:
        return Forget()
    return Issue(follows=True) if now >= current.ends - RENEW_BEFORE else None


def _valid(certificates: tuple[Certificate, ...], name: str, now: datetime) -> tuple[Certificate, ...]:
    return _distinct(tuple(certificate for certificate in certificates if certificate.serves(name, now)))


def _distinct(certificates: tuple[Certificate, ...]) -> tuple[Certificate, ...]:
    return tuple(dict.fromkeys(certificates))
