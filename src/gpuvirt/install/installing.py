"""What an install writes that helm can't: kinds that are to be upgraded, too, and an object of such a kind."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpuvirt import documents
from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.election import CONTROLLER_LEASE, Lease, leases
from gpuvirt.cluster.failures import NotFoundError, retried
from gpuvirt.cluster.kinds import clusterpolicy
from gpuvirt.cluster.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.cluster.kinds.core import AnyObject
from gpuvirt.cluster.operator import definitions
from gpuvirt.cluster.operator.definitions import DEFINITIONS, OURS, PART_OF, Definition, Manifest
from gpuvirt.cluster.resources import Resource
from gpuvirt.errors import ConfigError, GpuvirtError
from gpuvirt.install.uninstall import HOLDER

T = TypeVar("T")

NAMESPACES = Resource("namespaces")
WITHIN_S = 60.0
LOOK_EVERY_S = 0.2


class NotServedError(GpuvirtError):
    """The API server has a definition and does not serve its kind."""


def read_kinds(folder: Path) -> Sequence[Manifest]:
    """Return the definitions that lie in a folder, one a file; raises ConfigError."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError("no definitions; expected files *.yaml", where=str(folder))
    return [_read(file, definitions.API_VERSION, definitions.KIND) for file in files]


def read_policy(file: Path) -> Manifest:
    """Return the ClusterPolicy that lies in a file; raises ConfigError."""
    return _read(file, clusterpolicy.API_VERSION, clusterpolicy.KIND)


def _read(file: Path, api_version: str, kind: str) -> Manifest:
    found = documents.load(file, Manifest, null_is_absent=True)
    if (found.api_version, found.kind) != (api_version, kind):
        message = f"expected a {kind} of {api_version}, found {found.kind} of {found.api_version}"
        raise ConfigError(message, where=str(file), path="$.kind")
    return found


async def install_kinds(
    client: Client, manifests: Sequence[Manifest], clock: Clock, *, only_missing: bool
) -> Sequence[str]:
    """Have the API server serve our kinds as the manifests say; return what was done to each, for people.

    One that another product has defined is left as it is. Raises ApiError, NotServedError.
    """
    return [await _install(client, manifest, clock, only_missing=only_missing) for manifest in manifests]


async def _install(client: Client, manifest: Manifest, clock: Clock, *, only_missing: bool) -> str:
    name = manifest.metadata.name
    before = await _found(client, DEFINITIONS, name, Definition)
    if before is not None and not definitions.is_ours(before):
        return f"{name}: another product's, and left as it is"
    if before is not None and only_missing:
        return f"{name}: there, and left as it is"
    after = await retried(lambda: client.apply(DEFINITIONS, name, manifest, Definition), clock)
    deadline_s = clock.monotonic_s() + WITHIN_S
    while not definitions.is_served(after):
        if clock.monotonic_s() > deadline_s:
            raise NotServedError(
                f"{name}: the API server does not serve it after {WITHIN_S:g} s; its conditions say why:"
                f" kubectl describe crd {name}"
            )
        await clock.sleep(LOOK_EVERY_S)
        after = await client.get(DEFINITIONS, name, Definition)
    if before is None:
        return f"{name}: made"
    same = before.metadata.generation == after.metadata.generation
    return f"{name}: {'up to date' if same else 'brought up to date'}"


async def lift_hold(client: Client, namespace: str, clock: Clock) -> str | None:
    """Let controllers lead again where an uninstall keeps them from it; return what was done, for people.

    Raises ApiError.
    """
    return await retried(lambda: _lift_hold(client, namespace), clock)


async def _lift_hold(client: Client, namespace: str) -> str | None:
    held = await _found(client, leases(namespace), CONTROLLER_LEASE, Lease)
    if held is None or not (held.spec.holder_identity or "").startswith(HOLDER):
        return None
    with suppress(NotFoundError):
        await client.delete(leases(namespace), CONTROLLER_LEASE, held.metadata.uid)
    return "controllers may lead again, after an uninstall"


async def install_namespace(client: Client, name: str, clock: Clock) -> str:
    """Have a namespace take privileged pods, as agents are; return what was done, for people. Raises ApiError."""
    labels = {f"pod-security.kubernetes.io/{how}": "privileged" for how in ("enforce", "audit", "warn")}
    patch = {"metadata": {"labels": labels}}
    await retried(lambda: client.patch(NAMESPACES, name, patch, PatchType.MERGE, AnyObject), clock)
    return f"namespace {name}: takes privileged pods"


async def install_policy(client: Client, manifest: Manifest, clock: Clock) -> str:
    """Have the cluster's ClusterPolicy be as the manifest says; return what was done, for people.

    Raises ApiError, ConfigError where there is one of that name that is another installation's.
    """
    name = manifest.metadata.name
    before = await _found(client, CLUSTER_POLICIES, name, AnyObject)
    if before is not None and before.metadata.labels.get(PART_OF) != OURS:
        owner = before.metadata.annotations.get("meta.helm.sh/release-name", "")
        raise ConfigError(
            f"is another installation's{f' (helm release {owner})' if owner else ''}; expected none, or one with the"
            f" label {PART_OF}={OURS}; uninstall that, or set clusterPolicy.deployCR=false; to have it written from the"
            f" chart's values: kubectl label clusterpolicy {name} {PART_OF}={OURS}",
            where=f"ClusterPolicy {name}",
            path="$.metadata.labels",
        )
    after = await retried(lambda: client.apply(CLUSTER_POLICIES, name, manifest, AnyObject), clock)
    if before is None:
        return f"ClusterPolicy {name}: made"
    same = before.metadata.resource_version == after.metadata.resource_version
    return f"ClusterPolicy {name}: {'as it was' if same else 'changed'}"


async def _found(client: Client, resource: Resource, name: str, shape: type[T]) -> T | None:
    try:
        return await client.get(resource, name, shape)
    except NotFoundError:
        return None
