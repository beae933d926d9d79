"""What a policy says and gpuvirt does nothing about: where it stands, so that nobody takes it for done.

What is acted on is listed here once, and everything else that is set is told. Set is what is neither empty nor the
default that the kind's documentation gives. Of an operand that is switched off nothing is wanted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuvirt.plain import Plain

_NAMED = ("repository", "image", "version", "imagePullPolicy", "imagePullSecrets")
_POD = ("resources", "env", "hostNetwork")
_RUN = ("enabled", *_NAMED, *_POD, "args")
"""What is acted on of an operand that runs an image of the policy's."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is acted on of a part of the policy."""

    whole: tuple[str, ...] = ()
    """Fields that are, with all that is in them."""
    parts: Mapping[str, "_Known"] = field(default_factory=dict)
    """Fields of which some of what is in them is."""
    defaults: Mapping[str, Plain] = field(default_factory=dict)
    """Documented defaults of fields that are not acted on: set to them, they say nothing."""
    off: bool | None = None
    """Whether the part is switched off where `enabled` is not set; None where it has no switch."""


def _agents(*more: str, **parts: _Known) -> _Known:
    """Return what is known of an operand that is a part of the agent: its image is gpuvirt's."""
    return _Known(more, parts, off=False)


_UNKNOWN_ON, _UNKNOWN_OFF = _Known(off=False), _Known(off=True)
_CONFIG = _Known(("name", "default"))
_ONLY_SWITCH = _Known((*_NAMED, *_POD, "args", "defaultMode", "config"), off=True)
"""An operand that gpuvirt never deploys: the switch says it all, and its other fields add nothing."""
ACTED_ON = _Known(
    parts={
        "kataSandboxDevicePlugin": _ONLY_SWITCH,
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
        "sandboxWorkloads": _Known(("enabled", "defaultWorkload"), defaults={"mode": "kubevirt"}),
        "vfioManager": _agents("enabled"),
        "vgpuManager": _Known(_RUN, {"kernelModuleConfig": _Known(("name",))}, off=True),
        "vgpuDeviceManager": _agents("enabled", config=_CONFIG),
        "sandboxDevicePlugin": _agents("enabled", "requireReset", "imagePullSecrets", *_POD),
        "validator": _Known(
            ("enabled", "imagePullSecrets", *_POD),
            {name: _Known(("env",)) for name in ("driver", "toolkit", "plugin")},
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
        "toolkit": _Known((*(one for one in _RUN if one != "args"), "installDir"), off=False),
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
"""All that a policy may say and that is acted on, by the renderers of operands and by the controller."""
FOR_VMS = ("vfioManager", "vgpuManager", "vgpuDeviceManager", "sandboxDevicePlugin")
"""Operands of which nothing is wanted where no node is for virtual machines."""


def unsupported(spec: Plain) -> tuple[str, ...]:
    """Return the places (`$.spec.gds`) of what is set and not acted on, the outermost that are wholly so."""
    if not isinstance(spec, dict):
        return ()
    has_vms = _field(spec.get("sandboxWorkloads"), "enabled") is True
    said = {name: value for name, value in spec.items() if has_vms or name not in FOR_VMS}
    return tuple(sorted(_within(said, ACTED_ON, "$.spec")))


def _within(value: Plain, known: _Known, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        if _is_set(value):
            yield path
        return
    if _is_off(value, known):
        return
    wholly = not known.whole and not known.parts and not known.defaults
    if wholly:
        yield path
        return
    for name, inner in value.items():
        if name in known.parts:
            yield from _within(inner, known.parts[name], f"{path}.{name}")
        elif name not in known.whole and _is_set(inner) and inner != known.defaults.get(name):
            yield f"{path}.{name}"


def _is_off(value: Mapping[str, Plain], known: _Known) -> bool:
    if not _is_set(dict(value)):
        return True
    if known.off is None:
        return False
    enabled = value.get("enabled")
    return enabled is False or (enabled is None and known.off)


def _is_set(value: Plain) -> bool:
    """Return whether something is said; parts in which nothing is said say nothing."""
    if isinstance(value, dict):
        return any(_is_set(one) for one in value.values())
    return value is not None and value is not False and value not in ("", [])


def _field(value: Plain, name: str) -> Plain:
    return value.get(name) if isinstance(value, dict) else None
