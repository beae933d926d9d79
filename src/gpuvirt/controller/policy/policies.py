"""The ClusterPolicy in the controller's types: its settings, ignored fields, and invalid desired state in the cluster.

Contract: the switches of NVIDIA's operator: null is off for everything that concerns VMs, and the chart writes out what
is on. Invalid values are those of the policy, of nodes' labels, and of agents' reports.

Of the environment variables for gpuvirt's own programs, each one that is not read is reported. Those for NVIDIA's
images are passed on: which of them an image reads is not known.

`ACTED_ON` lists the fields that gpuvirt acts on; all others are reported if they are set. A field counts as set unless
it is empty or has the default of the kind's documentation. The fields of a disabled operand do not count.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.controller.nodes.labels import LabelInputs
from gpuvirt.controller.nodes.placement import Defaults, NodePlacement
from gpuvirt.controller.nodes.resolve import VgpuSwitch
from gpuvirt.controller.operands import agent
from gpuvirt.controller.operands.agent import KATA_ALIASES
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
from gpuvirt.plain import Plain
from gpuvirt.plans.knownconfigs import CONFIG_KEY

AGENT_READS = (
    *("GPUVIRT_AWAIT_CONTROLLER", "GPUVIRT_CONFIG", "GPUVIRT_HOST_ROOT", "GPUVIRT_KUBELET_DIR", "GPUVIRT_LISTEN"),
    *("GPUVIRT_LOG_FORMAT", "GPUVIRT_NODE_NAME", "GPUVIRT_PCI_IDS", "GPUVIRT_SYSTEM_ROOT", "GPUVIRT_VALIDATIONS_DIR"),
    *("KUBECONFIG", "NODE_NAME"),
)
"""The variables that `gpuvirt node` reads."""
VALIDATOR_READS = (
    *("GPUVIRT_DRIVER_DIR", "GPUVIRT_DRIVER_ROOT", "GPUVIRT_DRIVER_STARTED", "GPUVIRT_NODE_NAME"),
    *("GPUVIRT_SYSTEM_ROOT", "GPUVIRT_VALIDATIONS_DIR", "KUBECONFIG", "NODE_NAME"),
)
"""The variables that the checks of `gpuvirt validate` read."""
_BELOW = ("GRPC_*", "KUBERNETES_*", "LANG", "LC_*", "LD_*", "MALLOC_*", "NVIDIA_*", "PYTHON*", "SSL_CERT_*", "TZ")
"""Patterns of the variables that the programs' libraries, their interpreter and the container runtime read."""
_NAMED = "repository image version imagePullPolicy imagePullSecrets"
_POD = "resources env hostNetwork"
_RUN = f"enabled {_NAMED} {_POD} args"
"""The fields that gpuvirt acts on for an operand with an image of the policy."""
_ONLY_SWITCH = f"{_NAMED} {_POD} args defaultMode config"
"""Of an operand that gpuvirt never deploys, only the field `enabled` is reported."""
ACTED_ON: Mapping[str, str] = {
    "kataSandboxDevicePlugin": "enabled",
    "ccManager": _ONLY_SWITCH,
    "kataManager": _ONLY_SWITCH,
    "operator": "runtimeClass",
    "daemonsets": "labels annotations tolerations priorityClassName updateStrategy",
    "daemonsets.rollingUpdate": "maxUnavailable",
    "hostPaths": "rootFS driverInstallDir kubeletRootDir",
    "cdi": "enabled nriPluginEnabled",
    "mig": "strategy",
    "sandboxWorkloads": "enabled defaultWorkload mode",
    "vfioManager": "enabled",
    "vgpuManager": _RUN,
    "vgpuManager.kernelModuleConfig": "name",
    "vgpuDeviceManager": "enabled",
    "vgpuDeviceManager.config": "name default",
    "sandboxDevicePlugin": "enabled requireReset graceWithoutDriver vfioNodes resourcesWithoutGpus"
    " imagePullSecrets resources hostNetwork",
    "sandboxDevicePlugin.onDemand": "names prefix types idleCount sizes",
    "sandboxDevicePlugin.shares": "enforcement otherwise gpuMemoryMib",
    "sandboxDevicePlugin.shares.hamiCore": "library",
    "sandboxDevicePlugin.shares.mps": "enabled",
    "validator": "enabled imagePullSecrets resources hostNetwork",
    "validator.driver": "",
    "validator.toolkit": "",
    "validator.plugin": "",
    "driver": f"{_RUN} kernelModuleType startupProbe secretEnv useNvidiaDriverCRD",
    "driver.manager": f"{_NAMED} env",
    "driver.kernelModuleConfig": "name",
    "toolkit": f"enabled {_NAMED} {_POD} installDir",
    "devicePlugin": _RUN,
    "devicePlugin.mps": "",
    "dcgm": _RUN,
    "dcgmExporter": f"{_RUN} podAnnotations podLabels service hostPID",
    "dcgmExporter.config": "name",
    "gfd": _RUN,
}
"""The fields that gpuvirt acts on, in the operands' renderers and in the controller, by the part of the spec."""
VARIABLES: Mapping[str, tuple[str, ...]] = {
    # Parts of the agent have no program of their own.
    **dict.fromkeys(("kataSandboxDevicePlugin", "vfioManager", "vgpuDeviceManager"), ()),
    "sandboxDevicePlugin": (*AGENT_READS, *_BELOW),
    **dict.fromkeys(
        ("validator", "validator.driver", "validator.toolkit", "validator.plugin"), (*VALIDATOR_READS, *_BELOW)
    ),
}
"""Patterns of the variables of `env` that gpuvirt's own programs read, by the part of the spec."""
DEFAULTS: Mapping[str, Plain] = {
    "operator.defaultRuntime": "docker",
    "devicePlugin.mps.root": "/run/nvidia/mps",
    "dcgm.hostPort": 5555,
}
"""Documented defaults of ignored fields, which do not count as set with these values."""
ON = (
    *("kataSandboxDevicePlugin", "vfioManager", "vgpuDeviceManager", "sandboxDevicePlugin", "validator", "driver"),
    *("toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd", "migManager"),
)
"""The parts that are enabled if `enabled` is not set."""
OFF = (
    *("ccManager", "kataManager", "vgpuManager", "driver.rdma", "dcgmExporter.serviceMonitor", "gds", "gdrcopy"),
    *("dcgmExporter.hpcJobMapping", "nodeStatusExporter", "psp"),
)
"""The parts that are disabled if `enabled` is not set."""
FOR_VMS = ("vfioManager", "vgpuManager", "vgpuDeviceManager", "sandboxDevicePlugin")
"""Operands whose fields do not count if no node is for VMs."""
FOR_KATA = ("kataSandboxDevicePlugin",)
"""Operands whose fields count only in mode kata."""


def unsupported(spec: Plain) -> tuple[str, ...]:
    """Return the paths of set fields that gpuvirt ignores; a part that it ignores wholly is one path (`$.spec.gds`)."""
    if not isinstance(spec, dict):
        return ()
    sandbox = spec.get("sandboxWorkloads")
    has_vms = _field(sandbox, "enabled") is True
    has_kata = has_vms and _field(sandbox, "mode") == "kata"
    idle = {*(() if has_vms else FOR_VMS), *(() if has_kata else FOR_KATA)}
    found = set(_ignored_in({name: value for name, value in spec.items() if name not in idle}, ""))
    if has_kata:
        plugins = ("sandboxDevicePlugin", "kataSandboxDevicePlugin")
        found -= {f"{plugin}.env[{name}]" for plugin in plugins for name in KATA_ALIASES}
    return tuple(sorted(f"$.spec.{path}" for path in found))


def _ignored_in(part: Mapping[str, Plain], path: str) -> Iterator[str]:
    acted_on = ACTED_ON.get(path, "").split()
    for name, value in part.items():
        at = f"{path}.{name}" if path else name
        if isinstance(value, dict) and _is_off(value, at):
            continue
        if name == "env" and path in VARIABLES:
            yield from (f"{at}[{variable}]" for variable in _unread(value, VARIABLES[path]))
        elif isinstance(value, dict) and at in ACTED_ON:
            yield from _ignored_in(value, at)
        elif name not in acted_on and _is_set(value) and value != DEFAULTS.get(at):
            yield at


def _unread(env: Plain, read: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the variables with a value that a program does not read, by the patterns of those it reads."""
    for variable in env if isinstance(env, list) else ():
        name, value = str(_field(variable, "name")), _field(variable, "value")
        # NVIDIA's validator starts no pod with this value; gpuvirt's never does.
        is_default = (name, value) == ("WITH_WORKLOAD", "false")
        if _is_set(value) and not is_default and not any(fnmatchcase(name, pattern) for pattern in read):
            yield name


def _is_off(part: Mapping[str, Plain], path: str) -> bool:
    enabled = part.get("enabled")
    return (enabled is False and path in (*ON, *OFF)) or (enabled is None and path in OFF)


def _is_set(value: Plain) -> bool:
    """Return whether a field counts as set; an object counts if one of its fields does."""
    if isinstance(value, dict):
        return any(_is_set(inner) for inner in value.values())
    return value is not None and value is not False and value not in ("", [])


def _field(value: Plain, name: str) -> Plain:
    return value.get(name) if isinstance(value, dict) else None


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
