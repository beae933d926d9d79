"""The fields of a policy that are set but that gpuvirt ignores, so that the policy's status can name them.

Of the environment variables for gpuvirt's own programs, each one that is not read is reported. Those for NVIDIA's
images are passed on: which of them an image reads is not known.

`ACTED_ON` lists the fields that gpuvirt acts on; all others are reported if they are set. A field counts as set unless
it is empty or has the default of the kind's documentation. The fields of a disabled operand do not count.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from gpuvirt.controller.operands.agent import KATA_ALIASES
from gpuvirt.plain import Plain

_NAMED = ("repository", "image", "version", "imagePullPolicy", "imagePullSecrets")
_POD = ("resources", "env", "hostNetwork")
_RUN = ("enabled", *_NAMED, *_POD, "args")
"""The fields that gpuvirt acts on for an operand with an image of the policy."""


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


class _Known(msgspec.Struct, frozen=True):
    """The fields that gpuvirt acts on in a part of the policy."""

    whole: tuple[str, ...] = ()
    """Fields that gpuvirt acts on completely."""
    parts: Mapping[str, "_Known"] = msgspec.field(default_factory=dict)
    """Fields that gpuvirt acts on partly."""
    defaults: Mapping[str, Plain] = msgspec.field(default_factory=dict)
    """Documented defaults of ignored fields, which do not count as set with these values."""
    variables: tuple[str, ...] | None = None
    """The environment variables of `env` that gpuvirt's own program reads, as patterns; None for another program."""
    off: bool | None = None
    """Whether the part is disabled if `enabled` is not set; None if it has no such field."""


def _agents(*more: str, **parts: _Known) -> _Known:
    """Return the fields for an operand that is a part of the agent, and so has no image of its own."""
    return _Known(more, parts, variables=(), off=False)


_UNKNOWN_ON, _UNKNOWN_OFF = _Known(off=False), _Known(off=True)
_CONFIG = _Known(("name", "default"))
_ON_DEMAND = _Known(("names", "prefix", "types", "idleCount", "sizes"))
_SHARES = _Known(("enforcement", "gpuMemoryMib"), {"hamiCore": _Known(("library",)), "mps": _Known(("enabled",))})
_OF_CHECKS = (*VALIDATOR_READS, *_BELOW)
_ONLY_SWITCH = _Known((*_NAMED, *_POD, "args", "defaultMode", "config"), off=True)
"""An operand that gpuvirt never deploys: only its field `enabled` is reported."""
ACTED_ON = _Known(
    parts={
        "kataSandboxDevicePlugin": _agents("enabled"),
        "ccManager": _ONLY_SWITCH,
        "kataManager": _ONLY_SWITCH,
        "operator": _Known(("runtimeClass",), defaults={"defaultRuntime": "docker"}),
        "daemonsets": _Known(
            ("labels", "annotations", "tolerations", "priorityClassName", "updateStrategy"),
            {"rollingUpdate": _Known(("maxUnavailable",))},
        ),
        "hostPaths": _Known(("rootFS", "driverInstallDir", "kubeletRootDir")),
        "cdi": _Known(("enabled", "nriPluginEnabled")),
        "mig": _Known(("strategy",)),
        "sandboxWorkloads": _Known(("enabled", "defaultWorkload", "mode")),
        "vfioManager": _agents("enabled"),
        "vgpuManager": _Known(_RUN, {"kernelModuleConfig": _Known(("name",))}, off=True),
        "vgpuDeviceManager": _agents("enabled", config=_CONFIG),
        "sandboxDevicePlugin": _Known(
            (
                *("enabled", "requireReset", "graceWithoutDriver", "vfioNodes", "resourcesWithoutGpus"),
                *("imagePullSecrets", "resources", "hostNetwork"),
            ),
            {"onDemand": _ON_DEMAND, "shares": _SHARES},
            variables=(*AGENT_READS, *_BELOW),
            off=False,
        ),
        "validator": _Known(
            ("enabled", "imagePullSecrets", "resources", "hostNetwork"),
            {name: _Known(variables=_OF_CHECKS) for name in ("driver", "toolkit", "plugin")},
            variables=_OF_CHECKS,
            off=False,
        ),
        "driver": _Known(
            (*_RUN, "kernelModuleType", "startupProbe", "secretEnv", "useNvidiaDriverCRD"),
            {
                "manager": _Known((*_NAMED, "env")),
                "kernelModuleConfig": _Known(("name",)),
                "rdma": _UNKNOWN_OFF,
            },
            off=False,
        ),
        "toolkit": _Known((*(name for name in _RUN if name != "args"), "installDir"), off=False),
        "devicePlugin": _Known(_RUN, {"mps": _Known(defaults={"root": "/run/nvidia/mps"})}, off=False),
        "dcgm": _Known(_RUN, defaults={"hostPort": 5555}, off=False),
        "dcgmExporter": _Known(
            (*_RUN, "podAnnotations", "podLabels", "service", "hostPID"),
            {"config": _Known(("name",)), "serviceMonitor": _UNKNOWN_OFF, "hpcJobMapping": _UNKNOWN_OFF},
            off=False,
        ),
        "gfd": _Known(_RUN, off=False),
        "migManager": _UNKNOWN_ON,
        "nodeStatusExporter": _UNKNOWN_OFF,
        "gds": _UNKNOWN_OFF,
        "gdrcopy": _UNKNOWN_OFF,
        "psp": _UNKNOWN_OFF,
    },
)
"""All fields that gpuvirt acts on, in the operands' renderers and in the controller."""
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
    relevant = {name: value for name, value in spec.items() if name not in idle}
    found = set(_ignored_in(relevant, ACTED_ON, "$.spec"))
    if has_kata:
        plugins = ("sandboxDevicePlugin", "kataSandboxDevicePlugin")
        found -= {f"$.spec.{plugin}.env[{name}]" for plugin in plugins for name in KATA_ALIASES}
    return tuple(sorted(found))


def _ignored_in(value: Plain, known: _Known, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        if _is_set(value):
            yield path
        return
    if _is_off(value, known):
        return
    is_ignored = not known.whole and not known.parts and not known.defaults and known.variables is None
    if is_ignored:
        yield path
        return
    for name, inner in value.items():
        if name == "env" and known.variables is not None:
            yield from (f"{path}.env[{variable}]" for variable in _unread(inner, known.variables))
        elif name in known.parts:
            yield from _ignored_in(inner, known.parts[name], f"{path}.{name}")
        elif name not in known.whole and _is_set(inner) and inner != known.defaults.get(name):
            yield f"{path}.{name}"


def _unread(env: Plain, read: Sequence[str]) -> Iterator[str]:
    """Yield the names of the variables with a value that a program does not read, by the patterns of those it reads."""
    for variable in env if isinstance(env, list) else ():
        name, value = str(_field(variable, "name")), _field(variable, "value")
        # NVIDIA's validator starts no pod with this value; gpuvirt's never does.
        is_default = (name, value) == ("WITH_WORKLOAD", "false")
        if _is_set(value) and not is_default and not any(fnmatchcase(name, pattern) for pattern in read):
            yield name


def _is_off(value: Mapping[str, Plain], known: _Known) -> bool:
    if not _is_set(dict(value)):
        return True
    if known.off is None:
        return False
    enabled = value.get("enabled")
    return enabled is False or (enabled is None and known.off)


def _is_set(value: Plain) -> bool:
    """Return whether a field counts as set; an object counts if one of its fields does."""
    if isinstance(value, dict):
        return any(_is_set(inner) for inner in value.values())
    return value is not None and value is not False and value not in ("", [])


def _field(value: Plain, name: str) -> Plain:
    return value.get(name) if isinstance(value, dict) else None
