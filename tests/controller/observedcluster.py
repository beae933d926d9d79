"""A cluster as the controller observes it, built object by object."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.decisions import Decisions, decide
from gpuvirt.controller.deployment import Existing
from gpuvirt.controller.kubevirt.decisions import KubeVirtObserved
from gpuvirt.controller.nodes.resolve import OwnedGpuNode, ScheduledConfigs
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.writes import PatchPolicyStatus
from gpuvirt.kube.kinds.clusterpolicy import StoredPolicy
from gpuvirt.kube.kinds.core import Node, Pod, Service
from gpuvirt.kube.kinds.gpunode import Gpu, Spec, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.objects import key_of
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.workload import LABEL

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = ControllerSettings("gpu-operator")
NFD = {"feature.node.kubernetes.io/pci-10de.present": "true"}
ALL_ON = {
    "sandboxWorkloads": {"enabled": True},
    "vfioManager": {"enabled": True},
    "vgpuDeviceManager": {"enabled": True},
    "sandboxDevicePlugin": {"enabled": True},
}
NO_FIELDS: Mapping[str, object] = {}
NO_OWNERS: Mapping[str, str] = {}


def policy(
    fields: Mapping[str, object] = NO_FIELDS, name: str = "cluster-policy", created: str = "2026-01-01T00:00:00Z"
) -> StoredPolicy:
    """Return a ClusterPolicy with everything for VMs switched on, but for `fields`."""
    metadata = Metadata(name=name, uid=f"uid-{name}", generation=3, creation_timestamp=created)
    return StoredPolicy(metadata, msgspec.Raw(msgspec.json.encode({**ALL_ON, **fields})))


def node(workload: str | None = None, name: str = "node01", **labels: str) -> Node:
    """Return a node with a GPU; `labels` are of `nvidia.com`."""
    own = {f"nvidia.com/{key.replace('_', '.')}": value for key, value in labels.items()}
    return Node(Metadata(name=name, labels=NFD | own | ({LABEL: workload} if workload else {})))


class ObservedCluster(msgspec.Struct, frozen=True):
    """All observed objects."""

    nodes: Sequence[Node] = ()
    policies: Sequence[StoredPolicy] = (policy(),)
    gpu_nodes: Sequence[OwnedGpuNode] = ()
    pods: Sequence[Pod] = ()
    other_operator: str | None = None
    existing: Existing = msgspec.field(default_factory=Existing)
    kubevirt: KubeVirtObserved = msgspec.field(default_factory=KubeVirtObserved)
    services: Sequence[Service] = ()
    scheduled: ScheduledConfigs = msgspec.field(default_factory=ScheduledConfigs)

    @property
    def picture(self) -> Picture:
        return Picture(
            {key_of(policy): policy for policy in self.policies},
            {key_of(node): node for node in self.nodes},
            {key_of(node): node for node in self.gpu_nodes},
            replace(self.existing, pods={**self.existing.pods, **{key_of(pod): pod for pod in self.pods}}),
            self.other_operator,
            self.kubevirt,
            {key_of(service): service for service in self.services},
            self.scheduled,
        )

    def decided(self, settings: ControllerSettings = SETTINGS, failures: Sequence[str] = ()) -> Decisions:
        return decide(self.picture, settings, failures, AT)


def ready(decisions: Decisions, policy_name: str = "cluster-policy") -> Condition:
    (status,) = (
        write.status
        for write in decisions.writes
        if isinstance(write, PatchPolicyStatus) and write.target.name == policy_name
    )
    (found,) = (condition for condition in status.conditions if condition.type == "Ready")
    return found


def gpu_node(
    *, generation: int = 2, seen: int = 2, against: str = "", mode: str = "vgpu", owners: Mapping[str, str] = NO_OWNERS
) -> OwnedGpuNode:
    """Return a GpuNode as the API server has it; `owners` are those of the fields of its spec."""
    owned = [{"manager": owner, "fieldsV1": {"f:spec": {".": {}, f"f:{field}": {}}}} for field, owner in owners.items()]
    condition = Condition(
        type="Ready",
        status="False" if against else "True",
        reason="VgpuInUse" if against else "Reconciled",
        message=against,
        last_transition_time="2026-01-01T00:00:00Z",
    )
    status = Status(
        observed_generation=seen,
        gpus=(Gpu(address="0000:65:00.0", mode=mode),),
        conditions=(condition,),
    )
    content = {"metadata": {"name": "node01", "uid": "uid-1", "generation": generation, "managedFields": owned}}
    made = msgspec.json.decode(msgspec.json.encode(content), type=OwnedGpuNode)
    return replace(made, spec=Spec(mode=DesiredMode.VGPU, vgpu_config="default"), status=status)
