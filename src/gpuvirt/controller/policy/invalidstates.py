"""Invalid values of a cluster's desired state: in the ClusterPolicy, in nodes' labels, and in agents' reports."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.operands import agent
from gpuvirt.controller.picture import Picture
from gpuvirt.controller.policy import policies
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import parse_config_map_name
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.gpunode import ReadGpuNode
from gpuvirt.kube.kinds.vmoperands import VGPU_CONFIGS
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted
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
            where, code = f"{policies.display_name(name)} {fault.partition(':')[0]}", str(ReasonCode.CONFIG_INVALID)
            yield InvalidValue("", origin, where, code, f"{code}: {policies.display_name(name)} {fault}")


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
    where = f"{policies.display_name(policy.metadata.name)} $.spec.vgpuDeviceManager.config.name"
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
