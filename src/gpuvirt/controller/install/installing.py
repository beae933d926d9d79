"""The objects that an installation writes and helm can't: CRDs, which helm does not upgrade, and the ClusterPolicy."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpuvirt import documents
from gpuvirt.clock import Clock
from gpuvirt.controller import definitions
from gpuvirt.controller.definitions import DEFINITIONS, OURS, PART_OF, Definition, Manifest
from gpuvirt.controller.install.uninstall import HOLDER
from gpuvirt.errors import ConfigError, GpuvirtError
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import CONTROLLER_LEASE, Lease, leases
from gpuvirt.kube.failures import NotFoundError, retried
from gpuvirt.kube.kinds import clusterpolicy
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.kube.kinds.core import AnyObject
from gpuvirt.kube.resources import Resource

T = TypeVar("T")

NAMESPACES = Resource("namespaces")
WITHIN_S = 60.0
POLL_EVERY_S = 0.2


class NotServedError(GpuvirtError):
    """The API server has a CRD, but does not serve its kind."""


def read_kinds(folder: Path) -> Sequence[Manifest]:
    """Return the CRDs of a folder, one in each file; raises ConfigError."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError("has no CRDs; expected files *.yaml", where=str(folder))
    return [_read(file, definitions.API_VERSION, definitions.KIND) for file in files]


def read_policy(file: Path) -> Manifest:
    """Return the ClusterPolicy of a file; raises ConfigError."""
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
    """Apply the CRDs of gpuvirt's kinds and wait until they are served; return a line for each.

    A CRD of another product stays unchanged. Raises ApiError, NotServedError.
    """
    return [await _install(client, manifest, clock, only_missing=only_missing) for manifest in manifests]


async def _install(client: Client, manifest: Manifest, clock: Clock, *, only_missing: bool) -> str:
    name = manifest.metadata.name
    before = await _get(client, DEFINITIONS, name, Definition)
    if before is not None and not definitions.is_ours(before):
        return f"{name}: unchanged, since it belongs to another product"
    if before is not None and only_missing:
        return f"{name}: exists, unchanged"
    after = await retried(lambda: client.apply(DEFINITIONS, name, manifest, Definition), clock)
    deadline_s = clock.monotonic_s() + WITHIN_S
    while not definitions.is_served(after):
        if clock.monotonic_s() > deadline_s:
            raise NotServedError(
                f"{name}: the API server does not serve it after {WITHIN_S:g} s; its conditions have the reason:"
                f" kubectl describe crd {name}"
            )
        await clock.sleep(POLL_EVERY_S)
        after = await client.get(DEFINITIONS, name, Definition)
    if before is None:
        return f"{name}: created"
    same = before.metadata.generation == after.metadata.generation
    return f"{name}: {'up to date' if same else 'updated'}"


async def lift_hold(client: Client, namespace: str, clock: Clock) -> str | None:
    """Delete the lease by which an uninstall prevents controllers from leading; return a line if one was deleted.

    Raises ApiError.
    """
    return await retried(lambda: _lift_hold(client, namespace), clock)


async def _lift_hold(client: Client, namespace: str) -> str | None:
    held = await _get(client, leases(namespace), CONTROLLER_LEASE, Lease)
    if held is None or not (held.spec.holder_identity or "").startswith(HOLDER):
        return None
    with suppress(NotFoundError):
        await client.delete(leases(namespace), CONTROLLER_LEASE, held.metadata.uid)
    return "deleted the lease of an uninstall, so controllers can lead again"


async def install_namespace(client: Client, name: str, clock: Clock) -> str:
    """Label a namespace so that it admits privileged pods, as agents are; return a line. Raises ApiError."""
    labels = {f"pod-security.kubernetes.io/{mode}": "privileged" for mode in ("enforce", "audit", "warn")}
    patch = {"metadata": {"labels": labels}}
    await retried(lambda: client.patch(NAMESPACES, name, patch, PatchType.MERGE, AnyObject), clock)
    return f"namespace {name}: admits privileged pods"


async def install_policy(client: Client, manifest: Manifest, clock: Clock) -> str:
    """Apply the ClusterPolicy of the manifest; return a line.

    Raises ApiError, and ConfigError if a ClusterPolicy of that name belongs to another installation.
    """
    name = manifest.metadata.name
    before = await _get(client, CLUSTER_POLICIES, name, AnyObject)
    if before is not None and before.metadata.labels.get(PART_OF) != OURS:
        owner = before.metadata.annotations.get("meta.helm.sh/release-name", "")
        raise ConfigError(
            f"belongs to another installation{f' (helm release {owner})' if owner else ''}; expected none, or one with"
            f" the label {PART_OF}={OURS}; uninstall the other, or set clusterPolicy.deployCR=false; to let this"
            f" one write it from the chart's values: kubectl label clusterpolicy {name} {PART_OF}={OURS}",
            where=f"ClusterPolicy {name}",
            path="$.metadata.labels",
        )
    after = await retried(lambda: client.apply(CLUSTER_POLICIES, name, manifest, AnyObject), clock)
    if before is None:
        return f"ClusterPolicy {name}: created"
    same = before.metadata.resource_version == after.metadata.resource_version
    return f"ClusterPolicy {name}: {'unchanged' if same else 'changed'}"


async def _get(client: Client, resource: Resource, name: str, shape: type[T]) -> T | None:
    try:
        return await client.get(resource, name, shape)
    except NotFoundError:
        return None
