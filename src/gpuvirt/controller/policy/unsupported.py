"""The fields of a policy that are set but that gpuvirt ignores, so that the policy's status can name them.

Of the environment variables for gpuvirt's own programs, each one that is not read is reported. Those for NVIDIA's
images are passed on: which of them an image reads is not known.

`ACTED_ON` lists the fields that gpuvirt acts on; all others are reported if they are set. A field counts as set unless
it is empty or has the default of the kind's documentation. The fields of a disabled operand do not count.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from gpuvirt.controller.operands.agent import KATA_ALIASES
from gpuvirt.plain import Plain

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
    "sandboxDevicePlugin.shares": "enforcement gpuMemoryMib",
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
