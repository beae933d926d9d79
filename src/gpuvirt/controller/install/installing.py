"""An installation: its preview, the objects that helm can't write (CRDs at an upgrade, the ClusterPolicy), its check.

The preview has the controller's own decisions and the DaemonSets that it would render. An installation works once its
kinds are served, a controller leads, and all that its policy asks for is ready.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gpuvirt import documents
from gpuvirt.clock import Clock
from gpuvirt.controller import clusterstatus, definitions
from gpuvirt.controller.clusterstatus import PODS
from gpuvirt.controller.controller import its_leases
from gpuvirt.controller.definitions import DEFINITIONS, OURS, PART_OF, Definition, Manifest
from gpuvirt.controller.install.images import UNKNOWN_OS
from gpuvirt.controller.install.uninstall import KINDS
from gpuvirt.controller.nodes.labels import desired_labels, desired_labels_beside
from gpuvirt.controller.nodes.placement import Defaults, NodePlacement, placement_of
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.rendering import render
from gpuvirt.controller.policy import policies
from gpuvirt.errors import ConfigError, GpuvirtError
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.election import CONTROLLER_LEASE, UNINSTALL, Lease, leases
from gpuvirt.kube.failures import ForbiddenError, NotFoundError, UnreachableError, retried
from gpuvirt.kube.kinds import clusterpolicy
from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES, ClusterPolicy
from gpuvirt.kube.kinds.core import AnyObject, ReadNode
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.kube.labels import (
    DRIVER,
    GPU_FEATURES,
    OPERAND_LABEL,
    OPERANDS_LABEL,
    OS_LABEL,
    WORKLOAD_LABEL,
    deploy_label,
)
from gpuvirt.kube.resources import NODES, Collection, Metadata, Resource


class NodePreview(msgspec.Struct, frozen=True):
    """The parts that one node would get."""

    name: str
    has_gpus: bool
    """Whether a label says that it has GPUs. If none does, `components` are what it would get with GPUs."""
    workload: str
    origin: str
    """Where the workload is set: `label nvidia.com/gpu.workload.config`."""
    components: tuple[str, ...]
    note: str = ""
    """Why the node would get nothing, or not the driver, or not the workload of its label."""


class Preview(msgspec.Struct, frozen=True):
    """The parts that all nodes would get."""

    nodes: tuple[NodePreview, ...]
    notes: tuple[str, ...] = ()
    """Facts about the whole cluster."""


async def preview(client: Client, policy: ClusterPolicy, inputs: RenderInputs, selector: str = "") -> Preview:
    """Read the cluster's nodes with the labels of a selector, and return what they would get; raises ApiError."""
    nodes = (await client.list(Collection(NODES, ReadNode, labelled=selector))).items
    notes = [] if inputs.settings.coexists else [note async for note in _operators(client)]
    faults = (fault.because for fault in render(policy, inputs).faults)
    notes += [f"{fault.path}: {fault.message}; this part is not deployed" for fault in faults]
    return Preview(tuple(previews(nodes, policy, inputs)), tuple(notes))


async def _operators(client: Client) -> AsyncIterator[str]:
    try:
        leases = (await client.list(its_leases())).items
    except ForbiddenError:
        yield "unknown: whether NVIDIA's operator runs, since you may not list leases in all namespaces"
        return
    for lease in leases:
        if holder := lease.spec.holder_identity:
            place = f"{lease.metadata.namespace}/{lease.metadata.name}"
            yield f"lease {place} is held by {holder}: while NVIDIA's operator runs, the controller changes nothing"


def previews(nodes: Iterable[ReadNode], policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[NodePreview]:
    """Yield what each node would get, by name."""
    beside = inputs.settings.coexists
    policy = policies.beside(policy) if beside else policy
    defaults = policies.defaults_of(policy)
    sets = [manifest for manifest in render(policy, inputs).manifests if isinstance(manifest, DaemonSet)]
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        labels = node.metadata.labels
        found = any(labels.get(label) == "true" for label in GPU_FEATURES)
        metadata = replace(node.metadata, labels={GPU_FEATURES[0]: "true", **labels} if not found else labels)
        resources = frozenset[str]() if beside else node.resources
        placement = placement_of(metadata.labels, None, defaults, resources)
        desired = (desired_labels_beside if beside else desired_labels)(
            metadata, placement, policies.label_inputs_of(policy)
        )
        # Images of drivers depend on the operating system, which no label names before `gpuvirt discover` runs.
        then = {**metadata.labels, **desired.labels, OS_LABEL: UNKNOWN_OS}
        yield NodePreview(
            node.metadata.name,
            found,
            str(placement.workload or "invalid"),
            placement.origin,
            tuple(_component(each) for each in sets if each.spec.template.spec.node_selector.items() <= then.items()),
            _note(metadata, placement, defaults),
        )


def _component(daemon_set: DaemonSet) -> str:
    operand = daemon_set.metadata.labels[OPERAND_LABEL]
    return PODS.get(operand, operand)


def _note(metadata: Metadata, placement: NodePlacement, defaults: Defaults) -> str:
    if placement.operands_off:
        return f"label {OPERANDS_LABEL}=false"
    if placement.problem is not None:
        return placement.problem.text
    driver, workload = metadata.labels.get(deploy_label(DRIVER), "true"), metadata.labels.get(WORKLOAD_LABEL)
    is_ignored = workload and not defaults.sandboxed and workload != placement.workload
    notes = (
        f"label {WORKLOAD_LABEL}={workload} is ignored: sandboxWorkloads.enabled is not true" if is_ignored else None,
        placement.left_alone or (f"label {deploy_label(DRIVER)}={driver}" if driver != "true" else None),
    )
    return "; ".join(filter(None, notes))


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
        if holder and not holder.startswith(UNINSTALL) and first is not None and renewed != first:
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
    if held is None or not (held.spec.holder_identity or "").startswith(UNINSTALL):
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
