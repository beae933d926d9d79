"""What a node is for, as its label says, and which modes of its GPUs follow from that.

Source: NVIDIA's operator, whose label `nvidia.com/gpu.workload.config` and values these are. It takes an invalid value
for its default, and says so in its log alone; here all stays as it was, and the node says why.
"""

from enum import StrEnum

from gpuvirt.model.heard import NodeRequest, NodeSpec
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.settings import Settings
from gpuvirt.model.wanted import Modes, WantedMode

LABEL = "nvidia.com/gpu.workload.config"


class Workload(StrEnum):
    """What a node is for."""

    CONTAINER = "container"
    PASSTHROUGH = "vm-passthrough"
    VGPU = "vm-vgpu"


MODES = {
    Workload.CONTAINER: WantedMode.CONTAINER,
    Workload.PASSTHROUGH: WantedMode.PASSTHROUGH,
    Workload.VGPU: WantedMode.VGPU,
}


def modes_of(settings: Settings, request: NodeRequest, before: Modes) -> tuple[Modes, Reason | None]:
    """Return what is wanted of GPUs, and why what was heard does not say; `before` is what was wanted until now.

    A spec goes before all else. Where the label is to be followed and was not heard yet, nothing is wanted anew.
    """
    if request.spec is not None and request.spec.value is not None:
        return _of_spec(request.spec.value, before)
    label = request.workload
    if not settings.workload_label:
        return settings.own_modes, None
    if label is None:
        return before, None
    if label.value is None:
        return settings.own_modes, None
    if label.value not in MODES:
        return before, _unknown(label.value)
    modes = Modes(MODES[Workload(label.value)], settings.modes)
    return (before, _at_odds(label.value)) if modes.are_at_odds else (modes, None)


def _of_spec(spec: NodeSpec, before: Modes) -> tuple[Modes, Reason | None]:
    try:
        modes = Modes(WantedMode(spec.mode), {gpu: WantedMode(mode) for gpu, mode in spec.gpus.items()})
    except ValueError as error:
        return before, _bad_spec(f"has a mode that there is not: {error}", f"use one of {', '.join(WantedMode)}")
    if modes.are_at_odds:
        return before, _bad_spec("wants container and vgpu, which can't be on one node", "use one of the two")
    return modes, None


def _bad_spec(what: str, fix: str) -> Reason:
    return Reason(ReasonCode.CONFIG_INVALID, "GpuNode", f"{what}, so all stays as it was", fix=fix)


def _unknown(value: str) -> Reason:
    return Reason(
        ReasonCode.CONFIG_INVALID,
        f"label {LABEL}",
        f"is {value!r}, so all stays as it was",
        fix=f"label the node with one of {', '.join(Workload)}",
    )


def _at_odds(value: str) -> Reason:
    return Reason(
        ReasonCode.CONFIG_INVALID,
        f"label {LABEL}",
        f"is {value!r}, and the settings want single GPUs otherwise in a way that can't be on one node;"
        " so all stays as it was",
        seen="container and vgpu both need the kernel module nvidia.ko, each from another driver",
        fix="change the label, or the settings' modes",
    )
