"""The API objects of a world: nodes with their Leases, pods with budgets, VolumeAttachments, and a scheduler."""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.workers.hypervisor import Power, VmKey
from gpuvirt.model.workers.observed import NodePod, WorkerNode
from gpuvirt.model.workers.spec import PhaseName
from gpuvirt_sim.schedules.hypervisor import Vm

HEARTBEAT_S = 10.0
READY_S = 50.0
"""How long a node's condition stays True without a heartbeat (Kubernetes 1.36)."""
PHASE_LABEL = "vgpu.phase"
BIND_S = 3.0
GRACE_S = 20.0
BOOT_S = 5.0


class NodeObject(msgspec.Struct):
    """A Node, and the Lease of its kubelet."""

    name: NodeName
    vm: VmKey
    phases: frozenset[PhaseName]
    uid: int = 1
    version: int = 1
    unschedulable: bool = False
    cordoned_by: str = ""
    is_announced: bool = False
    by_admin: bool = False
    """Whether an admin has cordoned it."""
    opened_s: float = -1e9
    """When a user other than the schedule last let pods come, or made it a worker."""
    renewed_s: float = 0.0
    exists: bool = True
    most_pods: int = 1000
    """How many pods the scheduler places on it."""
    types: Mapping[PhaseName, str] = msgspec.field(default_factory=dict)
    """The vGPU types that profiles give its VM."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Those that profiles set; PHASE_LABEL names a phase whose pods it gets."""


class PodObject(msgspec.Struct):
    """A pod. `phase` is its node selector."""

    name: str
    phase: PhaseName
    uid: int
    node: NodeName | None = None
    bound_s: float = 0.0
    ends_at_s: float | None = None
    """When it ends by itself after its deletion; infinite for a pod that never does."""
    grace_s: float = GRACE_S
    flags: frozenset[str] = frozenset()
    has_volume: bool = False
    app: str = "pod"
    """The controller that creates it again."""


class ModelCluster(msgspec.Struct):
    """All objects."""

    nodes: dict[NodeName, NodeObject]
    vms: Mapping[VmKey, Vm]
    now_s: Callable[[], float]
    pods: list[PodObject] = msgspec.field(default_factory=list)
    attached: dict[NodeName, dict[str, float]] = msgspec.field(default_factory=dict)
    """VolumeAttachments, and when each is gone."""
    budget_until_s: float = 0.0
    """Until when a budget allows no eviction."""
    cordoned_s: dict[NodeName, float] = msgspec.field(default_factory=dict)
    """Since when a node has been unschedulable."""
    numbers: Iterator[int] = msgspec.field(default_factory=lambda: iter(range(1, 1_000_000)))
    _binding: list[tuple[float, PodObject, NodeName]] = msgspec.field(default_factory=list)

    def pass_time(self) -> None:
        """Let kubelets renew, pods end, and the scheduler bind."""
        now_s = self.now_s()
        for node in self.nodes.values():
            vm = self.vms[node.vm]
            alive = vm.power is Power.ON and now_s - vm.on_since_s >= BOOT_S
            if alive and node.exists and now_s - node.renewed_s >= HEARTBEAT_S:
                node.renewed_s = now_s
        self._end_pods(now_s)
        self._bind_pods(now_s)

    def is_ready(self, node: NodeObject) -> bool:
        """Return what the node's condition says."""
        return self.now_s() - node.renewed_s < READY_S

    def add_pod(
        self, phase: PhaseName, flags: frozenset[str] = frozenset(), *, volume: bool = False, app: str = "pod"
    ) -> PodObject:
        """Create a pod that waits for a node."""
        number = next(self.numbers)
        pod = PodObject(f"{app}-{number}", phase, number, flags=flags, has_volume=volume, app=app)
        self.pods.append(pod)
        return pod

    def evict(self, pod: PodObject) -> bool:
        """Begin to end a pod, unless the budget forbids it."""
        if self.now_s() < self.budget_until_s:
            return False
        self.end(pod)
        return True

    def end(self, pod: PodObject) -> None:
        """Begin to end a pod."""
        if pod.ends_at_s is None:
            pod.ends_at_s = self.now_s() + pod.grace_s

    def mark(
        self,
        node: NodeObject,
        schedule: str,
        *,
        cordon: bool | None,
        taint: bool | None,
        labels: tuple[tuple[str, str | None], ...] = (),
    ) -> None:
        """Change what a schedule has set on a node; None leaves it, and removes a label."""
        changed = {**node.labels, **dict(labels)}
        node.labels = {key: value for key, value in changed.items() if value is not None}
        if cordon is not None:
            node.unschedulable, node.cordoned_by = cordon, schedule if cordon else ""
        if taint is not None:
            node.is_announced = taint
        self.touch(node)

    def touch(self, node: NodeObject) -> None:
        """Give a node a new version, and note since when it is unschedulable."""
        node.version += 1
        if not node.unschedulable:
            self.cordoned_s.pop(node.name, None)
        else:
            self.cordoned_s.setdefault(node.name, self.now_s())

    def worker_node(self, name: NodeName) -> WorkerNode:
        """Return a node as the controller reads it."""
        node = self.nodes[name]
        vm = self.vms[node.vm]
        return WorkerNode(
            name,
            str(node.uid),
            str(node.version),
            node.phases,
            system_uuid=vm.system_uuid.upper(),
            is_unschedulable=node.unschedulable,
            cordoned_by=node.cordoned_by,
            is_announced=node.is_announced,
            is_ready=self.is_ready(node),
            renewal=str(node.renewed_s),
            types={phase: node.types[phase] for phase in node.phases if phase in node.types},
            labels=dict(node.labels),
        )

    def node_pods(self, name: NodeName) -> tuple[NodePod, ...]:
        """Return a node's pods as the controller reads them."""
        return tuple(
            NodePod(
                PodUid(str(pod.uid)),
                "default",
                pod.name,
                is_ending=pod.ends_at_s is not None,
                is_of_daemon_set="daemon" in pod.flags,
                is_static="mirror" in pod.flags,
                is_bare="bare" in pod.flags,
                has_empty_dir="empty dir" in pod.flags,
            )
            for pod in self.pods
            if pod.node == name
        )

    def _end_pods(self, now_s: float) -> None:
        for pod in list(self.pods):
            if pod.node is None or pod.ends_at_s is None or pod.ends_at_s > now_s:
                continue
            if self.vms[self.nodes[pod.node].vm].power is not Power.ON:
                continue  # no kubelet says that it has ended
            self.pods.remove(pod)
            if pod.has_volume:
                self.attached[pod.node][pod.name] = now_s + 3.0
            if "bare" not in pod.flags:
                self.add_pod(pod.phase, pod.flags, volume=pod.has_volume, app=pod.app)
        for volumes in self.attached.values():
            for name in [name for name, gone_s in volumes.items() if gone_s <= now_s]:
                del volumes[name]

    def _bind_pods(self, now_s: float) -> None:
        for at_s, pod, name in [binding for binding in self._binding if binding[0] <= now_s]:
            self._binding.remove((at_s, pod, name))
            if self.nodes[name].exists:
                pod.node, pod.bound_s = name, now_s
                if pod.has_volume:
                    self.attached.setdefault(name, {})[pod.name] = float("inf")
        coming = [pod for _, pod, _ in self._binding]
        for pod in self.pods:
            if pod.node is not None or pod in coming:
                continue
            fits = [
                node
                for node in self.nodes.values()
                if node.exists and _selects(pod, node) and not node.unschedulable and self.is_ready(node)
            ]
            taken = [pod.node for pod in self.pods] + [name for _, _, name in self._binding]
            fits = [node for node in fits if taken.count(node.name) < node.most_pods]
            if fits:
                fewest = min(fits, key=lambda node: taken.count(node.name))
                self._binding.append((now_s + BIND_S, pod, fewest.name))


def _selects(pod: PodObject, node: NodeObject) -> bool:
    """Return whether a pod's node selector fits: by the label of a profile, where profiles label the node."""
    return pod.phase in node.phases and (not node.types or node.labels.get(PHASE_LABEL) == pod.phase)
