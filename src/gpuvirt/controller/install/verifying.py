"""Whether an installation works: its kinds are served, a controller leads, and all that its policy wants is ready."""

from collections.abc import AsyncIterator

from gpuvirt.clock import Clock
from gpuvirt.controller import clusterstatus, definitions
from gpuvirt.controller.definitions import DEFINITIONS, Definition
from gpuvirt.controller.install.uninstall import HOLDER, KINDS
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import CONTROLLER_LEASE, Lease, leases
from gpuvirt.kube.failures import NotFoundError, UnreachableError

POLL_S = 1.0


class NotWorkingError(GpuvirtError):
    """A part of the installation does not work."""


async def verify(client: Client, namespace: Namespace, clock: Clock, timeout_s: float) -> AsyncIterator[str]:
    """Yield a line for each part that works, waiting for it until a timeout; raises NotWorkingError, ApiError."""
    until_s = clock.monotonic_s() + timeout_s
    for name in KINDS:
        yield f"{name}: {await _served(client, name)}"
    yield f"controller: {await _leader(client, namespace, clock, until_s)} leads"
    yield await _ready(client, namespace, clock, until_s)


async def _served(client: Client, name: str) -> str:
    try:
        found = await client.get(DEFINITIONS, name, Definition)
    except NotFoundError as error:
        raise NotWorkingError(f"the CustomResourceDefinition {name} is missing; helm upgrade creates it") from error
    if not definitions.is_served(found):
        raise NotWorkingError(f"the API server does not serve {name}; the reason: kubectl describe crd {name}")
    return "served"


async def _leader(client: Client, namespace: Namespace, clock: Clock, until_s: float) -> str:
    """Return the holder of the controllers' lease once it renews it: a controller that is gone leaves its lease.

    It leaves the policy's state, too, which stays `ready`.
    """
    first: str | None = None
    while True:
        lease = await _lease(client, namespace)
        holder, renewed = (lease.spec.holder_identity or "", lease.spec.renew_time) if lease is not None else ("", None)
        if holder and not holder.startswith(HOLDER) and first is not None and renewed != first:
            return holder
        first = first or renewed
        if clock.monotonic_s() >= until_s:
            state = f"{holder} does not renew it" if holder else "it has no holder"
            raise NotWorkingError(
                f"no controller leads: lease {CONTROLLER_LEASE} in namespace {namespace}: {state}; see the controller's"
                f" pods and their log: kubectl get pods -n {namespace} -l app.kubernetes.io/component=controller"
            )
        await clock.sleep(POLL_S)


async def _lease(client: Client, namespace: Namespace) -> Lease | None:
    try:
        return await client.get(leases(namespace), CONTROLLER_LEASE, Lease)
    except NotFoundError:
        return None


async def _ready(client: Client, namespace: Namespace, clock: Clock, until_s: float) -> str:
    """Return the verdict of `gpuvirt status` once all is ready."""
    while True:
        try:
            found = await clusterstatus.ask(client, namespace)
        except UnreachableError:
            if clock.monotonic_s() >= until_s:
                raise
        else:
            if found.well:
                return found.verdict
            if clock.monotonic_s() >= until_s:
                rows = (
                    f"{row.node} {row.component}: {row.state}: {row.detail}"
                    for row in found.components
                    if not row.ready
                )
                reasons = "; ".join(filter(None, (found.reason, *(value.text for value in found.invalid), *rows)))
                raise NotWorkingError(f"{found.verdict} ({reasons})" if reasons else found.verdict)
        await clock.sleep(POLL_S)
