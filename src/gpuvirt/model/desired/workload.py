"""What a node is for, as its label says, and which modes of its GPUs follow from that.

Source: NVIDIA's operator, whose label `nvidia.com/gpu.workload.config` and values these are. It takes an invalid value
for its default, and says so in its log alone; here all stays as it was, and the node says why.
"""

from collections.abc import Mapping
from enum import StrEnum

from gpuvirt import plain
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted
from gpuvirt.model.desired.observed import NodeRequest, NodeSpec
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Seen

LABEL = "nvidia.com/gpu.workload.config"
VGPU_CONFIG_LABEL = "nvidia.com/vgpu.config"
"""Which vGPU config a node is to have."""


class Workload(StrEnum):
    """What a node is for."""

    CONTAINER = "container"
    PASSTHROUGH = "vm-passthrough"
    VGPU = "vm-vgpu"


MODES = {
    Workload.CONTAINER: DesiredMode.CONTAINER,
    Workload.PASSTHROUGH: DesiredMode.PASSTHROUGH,
    Workload.VGPU: DesiredMode.VGPU,
}


def modes_of(settings: Settings, request: NodeRequest, before: Modes) -> tuple[Modes, InvalidDesired | None]:
    """Return what is wanted of GPUs, and what of it is invalid; `before` is what was wanted until now.

    A spec goes before all else. Where the label is to be followed and was not heard yet, nothing is wanted again.
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
        return before, unknown_workload(label.value)
    modes = Modes(MODES[Workload(label.value)], settings.modes)
    return (before, _at_odds(label.value)) if modes.are_at_odds else (modes, None)


def overridden_label(request: NodeRequest) -> InvalidDesired | None:
    """Return what is invalid of the label that a controller follows, which then leaves the spec as it was."""
    spec = request.spec.value if request.spec is not None else None
    value = request.workload.value if request.workload is not None else None
    follows = spec is not None and spec.mode_origin and spec.mode != DesiredMode.CONTAINER
    return unknown_workload(value) if follows and value is not None and value not in MODES else None


def named_addresses(settings: Settings, request: NodeRequest) -> Mapping[str, Source]:
    """Return the addresses of single GPUs that somebody wants in a mode, with where each is named."""
    spec = request.spec.value if request.spec is not None else None
    if spec is not None:
        return {
            gpu: Source(Origin.GPU_NODE, f"GpuNode $.spec.gpus[{index}].address") for index, gpu in enumerate(spec.gpus)
        }
    return addresses_of_settings(settings)


def addresses_of_settings(settings: Settings) -> Mapping[str, Source]:
    """Return the addresses in the agent's settings, with where each is named."""
    return {gpu: Source(Origin.SETTINGS, f"settings $.modes.{plain.told(gpu)}") for gpu in settings.modes}


def mode_source(settings: Settings, request: NodeRequest) -> Source:
    """Return where it is set what all GPUs of the node are kept as."""
    if request.spec is not None and request.spec.value is not None:
        return source_of_spec(request.spec.value.mode_origin, "mode")
    if settings.workload_label and request.workload is not None and request.workload.value is not None:
        return Source(Origin.LABEL, f"label {LABEL}")
    return Source(Origin.SETTINGS, "settings $.mode")


def source_of_spec(origin: str, field: str) -> Source:
    """Return where a field of a GpuNode's spec has its value from, as the controller has written it down there."""
    if origin.startswith("label "):
        return Source(Origin.LABEL, origin)
    if origin.startswith("ClusterPolicy "):
        return Source(Origin.CLUSTER_POLICY, origin)
    return Source(Origin.GPU_NODE, f"GpuNode $.spec.{field}")


def _of_spec(spec: NodeSpec, before: Modes) -> tuple[Modes, InvalidDesired | None]:
    fields = {"mode": spec.mode} | {f"gpus[{index}].mode": mode for index, mode in enumerate(spec.gpus.values())}
    for field, mode in fields.items():
        if mode not in set(DesiredMode):
            source = Source(Origin.GPU_NODE, f"GpuNode $.spec.{field}")
            problem = f"is {quoted(mode)}, which is no mode, so the node keeps its modes"
            return before, invalid(source, mode, problem, expected="a mode", known=DesiredMode)
    modes = Modes(DesiredMode(spec.mode), {gpu: DesiredMode(mode) for gpu, mode in spec.gpus.items()})
    if modes.are_at_odds:
        found = ", ".join(dict.fromkeys(fields.values()))
        problem = "sets container and vgpu, which can't be on one node, so the node keeps its modes"
        expected = "one of the two, beside passthrough and unmanaged"
        return before, invalid(Source(Origin.GPU_NODE, "GpuNode $.spec"), found, problem, expected=expected)
    return modes, None


def unknown_workload(value: str) -> InvalidDesired:
    """Return that a node's label has a value that is none."""
    return invalid(
        Source(Origin.LABEL, f"label {LABEL}"),
        value,
        f"is {quoted(value)}, so the node keeps its modes",
        expected="what the node is for",
        known=Workload,
        fix="without the label, the default applies",
    )


def _at_odds(value: str) -> InvalidDesired:
    return invalid(
        Source(Origin.LABEL, f"label {LABEL}"),
        value,
        f"is {value!r}, and the settings set modes for single GPUs that can't be beside it on one node;"
        " so the node keeps its modes",
        expected="a label and settings ($.modes) that do not set container and vgpu for one node",
        seen=Seen("", "container and vgpu both need the kernel module nvidia.ko, each from another driver"),
    )
