"""A preview of an installation: the parts that it would deploy to each node, by the nodes and its manifests.

The decisions are the controller's own, and the DaemonSets those that it would render.
"""

from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.clusterstatus import PODS
from gpuvirt.controller.controller import its_leases
from gpuvirt.controller.install.images import UNKNOWN_OS
from gpuvirt.controller.nodes.labels import desired_labels, desired_labels_beside
from gpuvirt.controller.nodes.placement import NodePlacement, placement_of
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.rendering import render
from gpuvirt.controller.policy import policies
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.kube.labels import DRIVER, GPU_FEATURES, OPERAND_LABEL, OPERANDS_LABEL, OS_LABEL, deploy_label
from gpuvirt.kube.resources import NODES, Collection, Metadata


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
    """Why the node would get nothing, or not the driver."""


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
    sets = [manifest for manifest in render(policy, inputs).manifests if isinstance(manifest, DaemonSet)]
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        labels = node.metadata.labels
        found = any(labels.get(label) == "true" for label in GPU_FEATURES)
        metadata = replace(node.metadata, labels={GPU_FEATURES[0]: "true", **labels} if not found else labels)
        resources = frozenset[str]() if beside else node.resources
        placement = placement_of(metadata.labels, None, policies.defaults_of(policy), resources)
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
            _note(metadata, placement),
        )


def _component(daemon_set: DaemonSet) -> str:
    operand = daemon_set.metadata.labels[OPERAND_LABEL]
    return PODS.get(operand, operand)


def _note(metadata: Metadata, placement: NodePlacement) -> str:
    if placement.operands_off:
        return f"label {OPERANDS_LABEL}=false"
    if placement.problem is not None:
        return placement.problem.text
    driver = metadata.labels.get(deploy_label(DRIVER), "true")
    return placement.left_alone or (f"label {deploy_label(DRIVER)}={driver}" if driver != "true" else "")
