"""The ClusterPolicy in the controller's types: its settings, and the invalid values of the cluster's desired state.

Contract: the switches of NVIDIA's operator: null is off for everything that concerns VMs, and the chart writes out what
is on. Invalid values are those of the policy, of nodes' labels, and of agents' reports.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.controller.nodes.labels import LabelInputs
from gpuvirt.controller.nodes.placement import Defaults, NodePlacement
from gpuvirt.controller.nodes.resolve import VgpuSwitch
from gpuvirt.controller.operands import agent
from gpuvirt.controller.picture import Picture
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import parse_config_map_name
from gpuvirt.kube.kinds.clusterpolicy import KIND, ClusterPolicy
from gpuvirt.kube.kinds.gpunode import ReadGpuNode
from gpuvirt.kube.kinds.vmoperands import VGPU_CONFIGS, SandboxWorkloads
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted
from gpuvirt.model.desired.vgpuconfig import DEFAULT
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.plans.knownconfigs import CONFIG_KEY


class InvalidValue(msgspec.Struct, frozen=True):
    """One invalid value of a cluster's desired state."""

    node: str
    """The node that the value belongs to; empty for a value of the whole cluster."""
    origin: str
    """The kind of its source: `label`, `clusterpolicy`."""
    where: str
    code: str
    message: str

    @property
    def text(self) -> str:
        """The message with the name of the node."""
        return f"node {self.node}: {self.message}" if self.node else self.message


def of_reports(gpu_nodes: Mapping[str, ReadGpuNode]) -> Iterator[InvalidValue]:
    """Yield the invalid values that agents report, each value once, where no valid policy says what nodes are for."""
    for name, gpu_node in sorted(gpu_nodes.items()):
        yield from of_node(name, None, gpu_node)


def of_node(name: str, placement: NodePlacement | None, gpu_node: ReadGpuNode | None) -> Iterator[InvalidValue]:
    """Yield the invalid values of one node: its label, and those of its agent's report, unless it is for containers."""
    found = dict[tuple[str, str], InvalidValue]()
    if placement is not None and (label := placement.invalid) is not None:
        found[label.origin, label.where] = _value(name, label)
    has_agent = placement is None or placement.workload is not Workload.CONTAINER
    if has_agent and gpu_node is not None and gpu_node.status is not None:
        for entry in gpu_node.status.invalid:
            value = InvalidValue(name, entry.origin, entry.where, entry.code, entry.message)
            found.setdefault((value.origin, value.where), value)
    yield from found.values()


def of_policy(name: str, problems: Iterable[Reason], faults: Iterable[str]) -> Iterator[InvalidValue]:
    """Yield the invalid fields of a policy: those that stop the controller, and those of operands' faults."""
    origin = str(Origin.CLUSTER_POLICY)
    for reason in problems:
        if reason.code is ReasonCode.CONFIG_INVALID:
            yield InvalidValue("", origin, reason.subject, str(reason.code), reason.text)
    for fault in faults:
        if fault.startswith("$."):
            where, code = f"{display_name(name)} {fault.partition(':')[0]}", str(ReasonCode.CONFIG_INVALID)
            yield InvalidValue("", origin, where, code, f"{code}: {display_name(name)} {fault}")


def of_config_map(policy: ClusterPolicy, picture: Picture) -> Iterator[InvalidValue]:
    """Yield the invalid value if the policy names a ConfigMap of vGPU configs that does not exist or lacks its key."""
    name = _named_map(policy)
    if name is None:
        return
    entries = picture.entries_of(name)
    if entries is not None and CONFIG_KEY in entries:
        return
    state = (
        "does not exist" if entries is None else f"has no key {CONFIG_KEY} (its keys: {', '.join(entries) or 'none'})"
    )
    where = f"{display_name(policy.metadata.name)} $.spec.vgpuDeviceManager.config.name"
    yield _value(
        "",
        invalid(
            Source(Origin.CLUSTER_POLICY, where),
            name,
            f"names the ConfigMap {quoted(name)}, which {state}; nodes have only the built-in vGPU configs",
            expected=f"a ConfigMap with the key {CONFIG_KEY} in the controller's namespace",
            known=picture.config_maps_with(CONFIG_KEY),
        ),
    )


def _value(node: str, found: InvalidDesired) -> InvalidValue:
    return InvalidValue(node, str(found.origin), found.where, str(found.reason.code), found.reason.text)


def _named_map(policy: ClusterPolicy) -> str | None:
    """Return the name of the ConfigMap that agents read; None if it is the default, invalid, or not needed."""
    manager = policy.spec.vgpu_device_manager
    name = manager.config.name if manager.config is not None else ""
    if name in {"", VGPU_CONFIGS} or not manager.enabled or not agent.is_desired(policy):
        return None
    try:
        return parse_config_map_name(name)
    except InvalidIdError:  # a fault of the agent, which is reported as such
        return None


def beside(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy for use beside NVIDIA's operator: VM nodes are on, although that operator has them off."""
    return _with_vm_nodes(policy, replace(policy.spec.sandbox_workloads, default_workload=None))


def while_leaving(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy for as long as a node still has VMs: their operands stay, even if VM nodes are switched off."""
    return _with_vm_nodes(policy, policy.spec.sandbox_workloads)


def _with_vm_nodes(policy: ClusterPolicy, sandbox: SandboxWorkloads) -> ClusterPolicy:
    return replace(policy, spec=replace(policy.spec, sandbox_workloads=replace(sandbox, enabled=True)))


def display_name(metadata_name: str) -> str:
    """Return a policy's name in messages: `ClusterPolicy cluster-policy`."""
    return f"{KIND} {metadata_name}"


def defaults_of(policy: ClusterPolicy) -> Defaults:
    """Return the policy's workload for nodes without a workload label."""
    sandbox = policy.spec.sandbox_workloads
    workload = Workload(sandbox.default_workload) if sandbox.default_workload is not None else Workload.CONTAINER
    return Defaults(bool(sandbox.enabled), workload, display_name(policy.metadata.name))


def vgpu_switch_of(policy: ClusterPolicy, kubevirt: KubeVirtDecisions) -> VgpuSwitch:
    """Return the policy's settings for modes and vGPU configs, and what KubeVirt's configuration forbids."""
    spec = policy.spec
    config = spec.vgpu_device_manager.config
    return VgpuSwitch(
        binds=bool(spec.vfio_manager.enabled),
        makes_vgpus=bool(spec.vgpu_device_manager.enabled),
        default=(config.default if config is not None else "") or DEFAULT,
        origin=display_name(policy.metadata.name),
        stopped_because=kubevirt.stopped_because,
        withheld=kubevirt.withheld,
    )


def label_inputs_of(policy: ClusterPolicy) -> LabelInputs:
    """Return the policy's settings for node labels."""
    spec = policy.spec
    mig = spec.mig_manager
    default = mig.config.default if mig.config is not None else ""
    return LabelInputs(
        mig_default=default if default == "all-disabled" and mig.enabled is not False else None,
        runs_agent=agent.is_desired(while_leaving(policy)),
    )
