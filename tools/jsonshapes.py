"""The JSON output of commands (`-o json`) as Markdown: each command with its shape, then the fields of each object."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import datetime
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

from gpuvirt.cli.changes import vgpu
from gpuvirt.cli.diagnosis.version import Versions
from gpuvirt.cli.output import changesrender, fleetrender
from gpuvirt.controller.clusterstatus import ClusterStatus
from gpuvirt.controller.clusterstatus import Row as ComponentRow
from gpuvirt.controller.install.installing import Preview
from gpuvirt.diagnosis import findings
from gpuvirt.diagnosis.explanation import DeviceExplanation
from gpuvirt.diagnosis.vms.podclaims import ClaimSeen
from gpuvirt.diagnosis.vms.vmexplanation import Explanation, NodeExplanation
from gpuvirt.kube.kinds import gpunode
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.overview import SharesOverview
from gpuvirt.plans.nodeplan import NodePlan
from gpuvirt_schedules.decide import reports
from gpuvirt_sim.commands import sim

COMMANDS: Mapping[str, object] = {
    "devices": NodeView,
    "devices --node NAME|--all-nodes": list[fleetrender.NodeDevices],
    "doctor": findings.Report,
    "why ADDRESS|RESOURCE": DeviceExplanation,
    "why vm/NAME|vmi/NAME|pod/NAME|claim/NAME": Explanation,
    "why node/NAME": NodeExplanation,
    "plan node/NAME": NodePlan,
    "status": ClusterStatus,
    "install check": Preview,
    "shares": SharesOverview,
    "claims": list[ClaimSeen],
    "schedule list": list[reports.ScheduleRow],
    "schedule show NAME": reports.ScheduleDetail,
    "schedule history NAME": reports.ScheduleHistory,
    "schedule plan NAME": reports.SchedulePlan,
    "schedule check NAME": reports.ScheduleCheck,
    "schedule switch NAME PHASE": reports.SwitchResult,
    "vfio status": list[changesrender.VfioGpu],
    "vfio bind": list[changesrender.VfioResult],
    "vfio unbind": list[changesrender.VfioResult],
    "vgpu apply": list[changesrender.VgpuResult],
    "vgpu assert": list[changesrender.VgpuResult],
    "vgpu list": list[changesrender.VgpuRow],
    "vgpu list --node NAME|--all-nodes": list[fleetrender.NodeVgpu],
    "vgpu types": list[changesrender.TypeRow],
    "vgpu create": list[changesrender.VgpuResult],
    "vgpu delete": list[changesrender.VgpuResult],
    "vgpu scheduler get": list[vgpu.SchedulerRow],
    "vgpu scheduler set": vgpu.SchedulerResult,
    "sim hosts": list[sim.SimulatedHostRow],
    "version": Versions,
}
NAMES: Mapping[type, str] = {
    gpunode.Gpu: "ReportedGpu",
    gpunode.Vgpu: "ReportedVgpu",
    gpunode.Offered: "ReportedResource",
    ComponentRow: "Component",
    changesrender.TypeRow: "VgpuType",
    changesrender.VgpuRow: "Vgpu",
}
"""The names of objects whose class name is used more than once."""
MOST_MEMBERS = 10
"""The largest number of enum members to list; the codes of reasons have tables of their own."""


Shape = object
"""A type in an annotation."""

TEXT = "text"
"""The shape of a field that has none."""
_PLAIN: Mapping[Shape, str] = {
    str: TEXT,
    int: "number",
    float: "number",
    bool: "boolean",
    datetime: "time",
}


def markdown() -> str:
    """Return both tables."""
    lines = ["| `gpuvirt ... -o json` | prints |", "|---|---|"]
    escaped = {command.replace("|", r"\|"): shape for command, shape in COMMANDS.items()}
    lines += [f"| `{command}` | {text(shape)} |" for command, shape in escaped.items()]
    lines += ["", "| object | fields |", "|---|---|"]
    for name, shape in _objects(COMMANDS.values()):
        shapes = {field: text(inner) for field, inner in fields_of(shape).items()}
        fields = "; ".join(f"`{field}`" if shape == TEXT else f"`{field}` {shape}" for field, shape in shapes.items())
        lines.append(f"| {name} | {fields} |")
    return "\n".join(lines) + "\n"


def text(shape: Shape) -> str:
    """Return a shape as text: `X[]` is a list, `X?` may be null, `X{}` is an object whose members are X."""
    shape, origin, parts = _parsed(shape)
    if isinstance(shape, type) and (is_dataclass(shape) or issubclass(shape, msgspec.Struct)):
        return NAMES.get(shape, shape.__name__)
    if isinstance(shape, type) and issubclass(shape, Enum):
        members = [str(member.value) for member in shape]
        is_short = 0 < len(members) <= MOST_MEMBERS
        return "one of " + ", ".join(f"`{member}`" for member in members) if is_short else "code"
    if origin in {Union, UnionType}:
        others = tuple(dict.fromkeys(text(part) for part in parts if part is not NoneType))
        return f"{_grouped(others)}?" if NoneType in parts else " or ".join(others)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{_grouped((text(parts[1]),))}{{}}"
    return f"{_grouped((text(parts[0]),))}[]" if origin is not None else _PLAIN[shape]


def _grouped(shapes: tuple[str, ...]) -> str:
    """Return shapes of which a value has one, in parentheses where they have several words."""
    words = " or ".join(shapes)
    return f"({words})" if " " in words else words


def _parsed(shape: Shape) -> tuple[Shape, Shape, tuple[Shape, ...]]:
    """Return a shape without the parts that JSON does not show, its origin, and its arguments."""
    while isinstance(shape, NewType) or get_origin(shape) is Annotated:
        shape = shape.__supertype__ if isinstance(shape, NewType) else get_args(shape)[0]
    parts = tuple(part for part in get_args(shape) if part is not Ellipsis)
    return shape, get_origin(shape), parts


def fields_of(shape: Shape) -> Mapping[str, Shape]:
    """Return the fields of an object by their names in JSON; none for other shapes."""
    if not isinstance(shape, type):
        return {}
    if issubclass(shape, msgspec.Struct):
        hints = get_type_hints(shape, include_extras=True)
        return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(shape)}
    if not is_dataclass(shape):
        return {}
    hints = get_type_hints(shape, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(shape)}


def _objects(shapes: Iterable[Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield each object with its name, in order of appearance."""
    seen: dict[str, Shape] = {}
    waiting = list(shapes)
    while waiting:
        shape, _, parts = _parsed(waiting.pop(0))
        fields = fields_of(shape)
        if not fields:
            waiting[:0] = parts
            continue
        name = text(shape)
        if name in seen and seen[name] is not shape:
            raise ValueError(f"two objects are called {name}; expected a name for one of them in NAMES")
        if name not in seen:
            seen[name] = shape
            yield name, shape
            waiting[:0] = fields.values()
