"""The summary of the decisions for nodes: for one node, for some, and for all of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter

import msgspec

from gpuvirt.controller.announcer import Announcement
from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.nodes.problems import NodeVerdict
from gpuvirt.controller.policy.invalidstates import InvalidValue
from gpuvirt.controller.writes import ApplyGpuNode, DeleteObject, PatchNode
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.labels import (
    DRIVER,
    OS_LABEL,
    TOOLKIT,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    WITH_TOOLKIT,
    WITH_VGPU_DRIVER,
    deploy_label,
)
from gpuvirt.model.desired.workload import Workload

CONTAINERD = "containerd"
NodeWrite = PatchNode | ApplyGpuNode | DeleteObject


class RuntimeCount(msgspec.Struct, frozen=True):
    """How many nodes for containers have one container runtime."""

    nodes: int
    first: str
    """The first of these nodes by name."""

    def __add__(self, other: "RuntimeCount") -> "RuntimeCount":
        """Return the count of both."""
        return RuntimeCount(self.nodes + other.nodes, min(self.first, other.first))


class NodesSummary(msgspec.Struct, frozen=True):
    """The decisions for some nodes, by name of the node, and what operands and the policy's status need of them."""

    writes: tuple[NodeWrite, ...] = ()
    verdicts: tuple[NodeVerdict, ...] = ()
    invalid: tuple[InvalidValue, ...] = ()
    announcements: tuple[Announcement, ...] = ()
    switched_off: tuple[str, ...] = ()
    """Nodes with GPUs whose operands an admin has switched off."""
    with_used_vgpus: tuple[str, ...] = ()
    drains: bool = False
    """Whether GPUs of a node still serve its previous workload."""
    workloads: frozenset[Workload | None] = frozenset()
    """The workloads of nodes with operands."""
    vgpu_systems: frozenset[str] = frozenset()
    """The operating systems of the nodes for vGPUs, and of those that still run their driver."""
    container_systems: frozenset[str] = frozenset()
    has_container_nodes: bool = False
    """Whether nodes have containers with GPUs, or still run the driver or toolkit for them."""
    runtimes: Mapping[str, RuntimeCount] = msgspec.field(default_factory=dict)

    @property
    def runtime(self) -> str:
        """The container runtime of most nodes for containers; containerd if no node has reported its own."""
        found = sorted(self.runtimes.items(), key=lambda runtime: (-runtime[1].nodes, runtime[1].first))
        return found[0][0] if found else CONTAINERD


def running_on(node: ReadNode, placement: NodePlacement, *, beside: bool) -> NodesSummary:
    """Return what one node runs; `beside`: NVIDIA's operator labels the nodes for vGPUs."""
    name, labels = node.metadata.name, node.metadata.labels
    runtime = node.status.node_info.container_runtime_version.partition("://")[0]
    has_toolkit = placement.counts and placement.workload in WITH_TOOLKIT
    system = frozenset({labels[OS_LABEL]}) if OS_LABEL in labels else frozenset[str]()

    def runs(workloads: Collection[Workload], label: str) -> bool:
        return label in labels or (placement.counts and placement.workload in workloads)

    of_vgpus = runs(WITH_VGPU_DRIVER, VGPU_DRIVER_LABEL if beside else deploy_label(VGPU_DRIVER))
    of_containers = runs({Workload.CONTAINER}, deploy_label(DRIVER))
    return NodesSummary(
        switched_off=(name,) if placement.present and placement.operands_off else (),
        with_used_vgpus=(name,) if placement.vgpus_used else (),
        drains=bool(placement.leaving) and placement.counts,
        workloads=frozenset({placement.workload}) if placement.counts else frozenset(),
        vgpu_systems=system if of_vgpus else frozenset(),
        container_systems=system if of_containers else frozenset(),
        has_container_nodes=of_containers or runs({Workload.SHARED}, deploy_label(TOOLKIT)),
        runtimes={runtime: RuntimeCount(1, name)} if has_toolkit and runtime else {},
    )


def together(parts: Sequence[NodesSummary]) -> NodesSummary:
    """Return the summary of the nodes of several parts, in the order of their names."""
    return NodesSummary(
        writes=tuple(sorted(chain.from_iterable(part.writes for part in parts), key=attrgetter("target.name"))),
        verdicts=tuple(sorted(chain.from_iterable(part.verdicts for part in parts), key=attrgetter("name"))),
        invalid=tuple(sorted(chain.from_iterable(part.invalid for part in parts), key=attrgetter("node"))),
        announcements=tuple(
            sorted(chain.from_iterable(part.announcements for part in parts), key=attrgetter("about.name"))
        ),
        switched_off=tuple(sorted(chain.from_iterable(part.switched_off for part in parts))),
        with_used_vgpus=tuple(sorted(chain.from_iterable(part.with_used_vgpus for part in parts))),
        drains=any(part.drains for part in parts),
        workloads=frozenset().union(*(part.workloads for part in parts)),
        vgpu_systems=frozenset().union(*(part.vgpu_systems for part in parts)),
        container_systems=frozenset().union(*(part.container_systems for part in parts)),
        has_container_nodes=any(part.has_container_nodes for part in parts),
        runtimes=_counted(chain.from_iterable(part.runtimes.items() for part in parts)),
    )


def _counted(found: Iterable[tuple[str, RuntimeCount]]) -> Mapping[str, RuntimeCount]:
    counts: dict[str, RuntimeCount] = {}
    for runtime, count in found:
        counts[runtime] = counts[runtime] + count if runtime in counts else count
    return counts
