"""The workload of a node, by its label, and the modes of its GPUs that follow from it.

Source: NVIDIA's operator, which has the same label `nvidia.com/gpu.workload.config` and the same values but `shared`,
`on-demand` and `claims`.
For an invalid value NVIDIA's operator uses its default, and reports that only in its log. gpuvirt keeps the modes, and
the GpuNode has the reason.
"""

from collections.abc import Mapping
from enum import StrEnum

from gpuvirt import plain
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Seen

LABEL = "nvidia.com/gpu.workload.config"
VGPU_CONFIG_LABEL = "nvidia.com/vgpu.config"
"""The label with the desired vGPU config of a node."""


class Workload(StrEnum):
    """The purpose of a node."""

    CONTAINER = "container"
    SHARED = "shared"
    PASSTHROUGH = "vm-passthrough"
    VGPU = "vm-vgpu"
    ON_DEMAND = "on-demand"
    CLAIMS = "claims"


MODES = {
    Workload.CONTAINER: DesiredMode.CONTAINER,
    Workload.SHARED: DesiredMode.SHARED,
    Workload.PASSTHROUGH: DesiredMode.PASSTHROUGH,
    Workload.VGPU: DesiredMode.VGPU,
    Workload.ON_DEMAND: DesiredMode.ON_DEMAND,
    Workload.CLAIMS: DesiredMode.CLAIMS,
}


def modes_of(settings: Settings, request: NodeRequest, before: Modes) -> tuple[Modes, InvalidDesired | None]:
    """Return the desired modes of GPUs, and an invalid value among their sources; `before` are the last modes.

    A GpuNode's spec takes precedence. While a label that the agent must follow is not observed, the modes stay.
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
    at_odds = modes.at_odds
    return (modes, None) if at_odds is None else (before, _at_odds(label.value, at_odds))


def overridden_label(request: NodeRequest) -> InvalidDesired | None:
    """Return an invalid label of a node whose spec follows the label: the controller then keeps the spec."""
    spec = request.spec.value if request.spec is not None else None
    value = request.workload.value if request.workload is not None else None
    follows = spec is not None and spec.mode_origin and spec.mode != DesiredMode.CONTAINER
    return unknown_workload(value) if follows and value is not None and value not in MODES else None


def named_addresses(settings: Settings, request: NodeRequest) -> Mapping[str, Source]:
    """Return the addresses of single GPUs with a desired mode, with the place of each."""
    spec = request.spec.value if request.spec is not None else None
    if spec is not None:
        return {
            gpu: Source(Origin.GPU_NODE, f"GpuNode $.spec.gpus[{index}].address") for index, gpu in enumerate(spec.gpus)
        }
    return addresses_of_settings(settings)


def addresses_of_settings(settings: Settings) -> Mapping[str, Source]:
    """Return the addresses in the agent's settings, with the place of each."""
    return {gpu: Source(Origin.SETTINGS, f"settings $.modes.{plain.one_line(gpu)}") for gpu in settings.modes}


def mode_source(settings: Settings, request: NodeRequest) -> Source:
    """Return the source of the desired mode of all GPUs of the node."""
    if request.spec is not None and request.spec.value is not None:
        return source_of_spec(request.spec.value.mode_origin, "mode")
    if settings.workload_label and request.workload is not None and request.workload.value is not None:
        return Source(Origin.LABEL, f"label {LABEL}")
    return Source(Origin.SETTINGS, "settings $.mode")


def source_of_spec(origin: str, field: str) -> Source:
    """Return the source of a field of a GpuNode's spec; `origin` is the controller's entry for the field."""
    if origin.startswith("label "):
        return Source(Origin.LABEL, origin)
    if origin.startswith("ClusterPolicy "):
        return Source(Origin.CLUSTER_POLICY, origin)
    return Source(Origin.GPU_NODE, f"GpuNode $.spec.{field}")


def _of_spec(spec: GpuNodeSpec, before: Modes) -> tuple[Modes, InvalidDesired | None]:
    fields = {"mode": spec.mode} | {f"gpus[{index}].mode": mode for index, mode in enumerate(spec.gpus.values())}
    for field, mode in fields.items():
        if mode not in set(DesiredMode):
            source = Source(Origin.GPU_NODE, f"GpuNode $.spec.{field}")
            problem = f"is {quoted(mode)}, which is not a mode, so the node keeps its modes"
            return before, invalid(source, mode, problem, expected="a mode", known=DesiredMode)
    modes = Modes(DesiredMode(spec.mode), {gpu: DesiredMode(mode) for gpu, mode in spec.gpus.items()})
    if (at_odds := modes.at_odds) is not None:
        found = ", ".join(dict.fromkeys(fields.values()))
        problem = f"sets {at_odds}, which can't be on one node, so the node keeps its modes"
        expected = "one of the two, beside passthrough and unmanaged"
        return before, invalid(Source(Origin.GPU_NODE, "GpuNode $.spec"), found, problem, expected=expected)
    return modes, None


def unknown_workload(value: str) -> InvalidDesired:
    """Return an invalid value of a node's workload label."""
    return invalid(
        Source(Origin.LABEL, f"label {LABEL}"),
        value,
        f"is {quoted(value)}, so the node keeps its modes",
        expected="a workload",
        known=Workload,
        fix="without the label, the default applies",
    )


def _at_odds(value: str, at_odds: str) -> InvalidDesired:
    return invalid(
        Source(Origin.LABEL, f"label {LABEL}"),
        value,
        f"is {value!r}, but the settings set modes for single GPUs that can't be on the same node;"
        " so the node keeps its modes",
        expected=f"a label and settings ($.modes) that do not set both {at_odds} for one node",
        seen=Seen("", f"{at_odds} both need the kernel module nvidia.ko, each from another driver"),
    )
