"""Keeps the webhook's certificate valid and trusted: reads the Secret and the configuration, and makes the next step.

    issue the next certificate -> trust it, too -> serve it -> trust the previous one for a day -> forget it

Each step follows from the two objects and the time, so a controller may end after any step, and another goes on. The
webhook never serves a certificate before the API servers trust it, and they trust each while a replica may serve it.
Each write needs the version of the object that was read.
"""

import asyncio
import logging
import os
import re
import ssl
import subprocess
import sys
from base64 import b64encode
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import Namespace, ObjectName
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError
from gpuvirt.kube.jsonpatch import Op, Operation, at, conditional
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.core import Service
from gpuvirt.kube.kinds.parts import OwnerReference
from gpuvirt.kube.kinds.workloads import Secret, SecretMetadata, secrets
from gpuvirt.kube.resources import Metadata, Resource, services
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError

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


# Configurations of admission webhooks, with the fields by which the API server trusts a webhook.
CONFIGURATIONS = Resource("mutatingwebhookconfigurations", "admissionregistration.k8s.io")


class ClientConfig(msgspec.Struct, frozen=True, rename="camel"):
    """How the API server connects to a webhook."""

    ca_bundle: bytes = b""
    """The authorities of the webhook's certificate, in PEM. JSON has it in base64."""


class Webhook(msgspec.Struct, frozen=True, rename="camel"):
    """A webhook of a configuration."""

    client_config: ClientConfig = ClientConfig()


class WebhookConfiguration(msgspec.Struct, frozen=True):
    """A MutatingWebhookConfiguration."""

    metadata: Metadata
    webhooks: tuple[Webhook, ...] = ()


class NotIssuedError(GpuvirtError):
    """No certificate could be issued; the text has the reason."""


log = logging.getLogger(__name__)

T = TypeVar("T")

SIGNING = (sys.executable, "-P", "-m", "gpuvirt.controller.webhookcertificate.signing")
Values = dict[str, bytes | None]
"""Values of a Secret by key; None removes one."""
EVERY_S = 5.0
"""How often the two objects are read: the API server refuses the pods of a new webhook until its CA is set."""
TRY_S = 90.0
CRT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
NEXT_CRT, NEXT_KEY, PREVIOUS = "next.crt", "next.key", "previous.crt"
MOST_STEPS = 8
"""The most steps at once; a rotation has five."""


class CertificateNames(msgspec.Struct, frozen=True):
    """The names of the webhook's objects."""

    namespace: Namespace
    webhook: ObjectName
    """The name of the Service, and of the configuration."""

    @property
    def secret(self) -> str:
        """The name of the Secret."""
        return f"{self.webhook}-cert"

    @property
    def server(self) -> str:
        """The DNS name by which the API server connects."""
        return f"{self.webhook}.{self.namespace}.svc"


class CertificateKeeper:
    """Keeps the certificate while this process leads."""

    def __init__(self, client: Client, names: CertificateNames, clock: Clock) -> None:
        """`client` writes only while this process leads."""
        self.ends_s: float | None = None
        """When the current certificate ends, in seconds of the wall clock; None while it is unknown."""
        self.problem: str | None = None
        """Why the certificate is not kept; None if it is."""
        self._client = client
        self._names = names
        self._clock = clock
        self._worker = ThreadWorker("certificates")

    async def keep(self) -> None:
        """Keep the certificate, until cancelled."""
        while True:
            await self.check()
            await self._clock.sleep(EVERY_S)

    async def check(self) -> bool:
        """Make all steps that are due; return whether none failed."""
        try:
            async with asyncio.timeout(TRY_S):
                for _ in range(MOST_STEPS):
                    if not await self._advance():
                        break
        except ConflictError as error:
            log.debug("%s; reading the objects again", error)
            return False
        except (ApiError, NotIssuedError, WorkerBlockedError, TimeoutError) as error:
            problem = str(error) or "the API server does not answer"
            if problem != self.problem:
                log.warning("the webhook's certificate is not kept: %s", problem)
            self.problem = problem
            return False
        self.problem = None
        return True

    async def _advance(self) -> bool:
        """Make the next step; return whether there was one."""
        secret = await self._read(secrets(self._names.namespace), self._names.secret, Secret)
        configuration = await self._read(CONFIGURATIONS, self._names.webhook, WebhookConfiguration)
        held = _held(secret)
        trusted = certificates_in(_bundle(configuration)) if configuration is not None else None
        self.ends_s = held.current.certificate.ends.timestamp() if held.current is not None else None
        step = next_step(held, trusted, self._names.server, self._clock.now())
        if step is None:
            return False
        if not isinstance(step, Trust):
            await self._write(secret, await self._changed(step, held))
        elif configuration is not None:
            await self._trust(configuration, step.certificates)
        log.info("the webhook's certificate", extra={"step": type(step).__name__.lower(), "secret": self._names.secret})
        return True

    async def _read(self, resource: Resource, name: str, kind: type[T]) -> T | None:
        try:
            return await self._client.get(resource, name, kind)
        except NotFoundError:
            return None

    async def _changed(self, step: Issue | Promote | Forget, held: Held) -> Values:
        """Return the changes of a step in the Secret."""
        match step:
            case Issue():
                name = self._names.server
                pair = await self._worker.run(lambda: issue(name, VALID_DAYS), name="signing", timeout_s=TRY_S / 3)
                following: Values = {NEXT_CRT: pair.certificate.pem, NEXT_KEY: pair.key}
                return following if step.follows else _serving(pair, step.previous)
            case Promote():
                current = (held.current.certificate,) if held.current is not None else ()
                return _serving(held.following, (*current, *held.previous)) if held.following is not None else {}
            case Forget():
                return {PREVIOUS: None}

    async def _write(self, secret: Secret | None, values: Values) -> None:
        """Create the Secret, or change the one that was read; other values and fields of it stay."""
        resource, name = secrets(self._names.namespace), self._names.secret
        if secret is not None:
            patch = {"metadata": {"resourceVersion": secret.metadata.resource_version}, "data": values}
            await self._client.patch(resource, name, patch, PatchType.MERGE, Secret)
            return
        service = await self._client.get(services(self._names.namespace), self._names.webhook, Service)
        owner = OwnerReference(
            api_version=workloads.CORE, kind="Service", name=service.metadata.name, uid=service.metadata.uid
        )
        metadata = SecretMetadata(name=name, namespace=self._names.namespace, owner_references=(owner,))
        data = {key: value for key, value in values.items() if value is not None}
        await self._client.create(resource, Secret(metadata=metadata, data=data), Secret)

    async def _trust(self, configuration: WebhookConfiguration, certificates: tuple[Certificate, ...]) -> None:
        """Have the API server trust these certificates of the webhook."""
        bundle = b64encode(b"".join(certificate.pem for certificate in certificates)).decode()
        operations = [
            Operation(Op.ADD, at("webhooks", str(index), "clientConfig", "caBundle"), bundle)
            for index in range(len(configuration.webhooks))
        ]
        patch = conditional(configuration.metadata.resource_version, operations)
        name = self._names.webhook
        await self._client.patch(CONFIGURATIONS, name, patch, PatchType.JSON, WebhookConfiguration)


def _held(secret: Secret | None) -> Held:
    if secret is None:
        return Held()
    data = secret.data
    following = pair_of(data.get(NEXT_CRT, b""), data.get(NEXT_KEY, b""))
    return Held(pair_of(data.get(CRT, b""), data.get(KEY, b"")), following, certificates_in(data.get(PREVIOUS, b"")))


def _serving(pair: Pair, previous: tuple[Certificate, ...]) -> Values:
    """Return the values of the Secret with which the webhook serves a certificate."""
    own: Values = {CRT: pair.certificate.pem, KEY: pair.key, CA: pair.certificate.pem}
    old = b"".join(certificate.pem for certificate in previous)
    return own | {NEXT_CRT: None, NEXT_KEY: None, PREVIOUS: old or None}


def _bundle(configuration: WebhookConfiguration) -> bytes:
    """Return the CA that all webhooks of a configuration trust; nothing if they differ."""
    bundles = {webhook.client_config.ca_bundle for webhook in configuration.webhooks}
    return bundles.pop() if len(bundles) == 1 else b""


def issue(name: str, days: int) -> Pair:
    """Return a new certificate for a server's DNS name, which a child signs; raise NotIssuedError."""
    try:
        done = subprocess.run(
            (*SIGNING, name, str(days)), stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotIssuedError(f"the program that signs certificates can't be run: {error}") from error
    # Its output has the key, so only its errors may be shown.
    key, begin, certificate = done.stdout.partition(b"-----BEGIN CERTIFICATE-----")
    pair = pair_of(begin + certificate, key)
    if done.returncode or pair is None:
        detail = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        raise NotIssuedError(f"no certificate was signed (exit status {done.returncode}): {detail}")
    return pair
