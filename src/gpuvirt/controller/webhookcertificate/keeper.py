"""Keeps the webhook's certificate valid and trusted: reads the Secret and the configuration, and makes the next step.

Each write needs the version of the object that was read.
"""

import asyncio
import logging
from base64 import b64encode

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.controller.webhookcertificate.certificate import (
    Certificate,
    NotIssuedError,
    Pair,
    certificates_in,
    issue,
    pair_of,
)
from gpuvirt.controller.webhookcertificate.rotation import VALID_DAYS, Forget, Held, Issue, Promote, Trust, next_step
from gpuvirt.facts.ids import Namespace, ObjectName
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError
from gpuvirt.kube.jsonpatch import Op, Operation, at, conditional
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.core import Service
from gpuvirt.kube.kinds.manifests import OwnerReference
from gpuvirt.kube.kinds.secrets import Secret, SecretMetadata, secrets
from gpuvirt.kube.resources import Metadata, Resource, services
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError

# Configurations of admission webhooks, with the fields by which the API server trusts a webhook.
CONFIGURATIONS = Resource("mutatingwebhookconfigurations", "admissionregistration.k8s.io")


class ClientConfig(msgspec.Struct, frozen=True, rename="camel"):
    """How the API server connects to a webhook."""

    ca_bundle: bytes = b""
    """The authorities of the webhook's certificate, in PEM. JSON has it in base64."""


class Webhook(msgspec.Struct, frozen=True, rename="camel"):
    """A webhook of a configuration."""

    name: str = ""
    client_config: ClientConfig = ClientConfig()


class WebhookConfiguration(msgspec.Struct, frozen=True):
    """A MutatingWebhookConfiguration."""

    metadata: Metadata
    webhooks: tuple[Webhook, ...] = ()


log = logging.getLogger(__name__)

Values = dict[str, bytes | None]
"""Values of a Secret by key; None removes one."""
CHECK_S = 60.0
TRY_S = 30.0
AGAIN_S = 5.0
"""The pause after a failure."""
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
        self._worker = ThreadWorker("openssl")

    async def keep(self) -> None:
        """Keep the certificate, for ever."""
        while True:
            await self._clock.sleep(CHECK_S if await self.check() else AGAIN_S)

    async def check(self) -> bool:
        """Make all steps that are due; return whether none failed."""
        try:
            async with asyncio.timeout(TRY_S + CHECK_S):
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
        secret = await self._secret()
        configuration = await self._configuration()
        held = _held(secret)
        trusted = certificates_in(_bundle(configuration)) if configuration is not None else None
        self.ends_s = held.current.certificate.ends.timestamp() if held.current is not None else None
        step = next_step(held, trusted, self._names.server, self._clock.now())
        if step is None:
            return False
        if isinstance(step, Trust):
            await self._trust(configuration, step.certificates)
        else:
            await self._write(secret, await self._changed(step, held))
        log.info("the webhook's certificate", extra={"step": type(step).__name__.lower(), "secret": self._names.secret})
        return True

    async def _secret(self) -> Secret | None:
        try:
            return await self._client.get(secrets(self._names.namespace), self._names.secret, Secret)
        except NotFoundError:
            return None

    async def _configuration(self) -> WebhookConfiguration | None:
        try:
            return await self._client.get(CONFIGURATIONS, self._names.webhook, WebhookConfiguration)
        except NotFoundError:
            return None

    async def _changed(self, step: Issue | Promote | Forget, held: Held) -> Values:
        """Return the changes of a step in the Secret."""
        match step:
            case Issue(follows=True):
                pair = await self._issued()
                return {NEXT_CRT: pair.certificate.pem, NEXT_KEY: pair.key}
            case Issue():
                return _serving(await self._issued(), step.previous)
            case Promote():
                current = (held.current.certificate,) if held.current is not None else ()
                return _serving(held.following, (*current, *held.previous)) if held.following is not None else {}
            case Forget():
                return {PREVIOUS: None}

    async def _issued(self) -> Pair:
        name = self._names.server
        return await self._worker.run(lambda: issue(name, VALID_DAYS), name="openssl", timeout_s=TRY_S)

    async def _write(self, found: Secret | None, values: Values) -> None:
        """Create the Secret, or change the one that was read; other values and fields of it stay."""
        resource, name = secrets(self._names.namespace), self._names.secret
        if found is not None:
            patch = {"metadata": {"resourceVersion": found.metadata.resource_version}, "data": values}
            await self._client.patch(resource, name, patch, PatchType.MERGE, Secret)
            return
        service = await self._client.get(services(self._names.namespace), self._names.webhook, Service)
        owners = (_owner(service.metadata),)
        metadata = SecretMetadata(name=name, namespace=self._names.namespace, owner_references=owners)
        data = {key: value for key, value in values.items() if value is not None}
        await self._client.create(resource, Secret(metadata=metadata, data=data), Secret)

    async def _trust(self, found: WebhookConfiguration | None, certificates: tuple[Certificate, ...]) -> None:
        """Have the API server trust these certificates of the webhook."""
        if found is None:
            return
        bundle = b64encode(b"".join(certificate.pem for certificate in certificates)).decode()
        operations = [
            Operation(Op.ADD, at("webhooks", str(index), "clientConfig", "caBundle"), bundle)
            for index in range(len(found.webhooks))
        ]
        patch = conditional(found.metadata.resource_version, operations)
        name = self._names.webhook
        await self._client.patch(CONFIGURATIONS, name, patch, PatchType.JSON, WebhookConfiguration)


def _owner(service: Metadata) -> OwnerReference:
    return OwnerReference(api_version=workloads.CORE, kind="Service", name=service.name, uid=service.uid)


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
