"""The output about nodes of a cluster: their GPUs and vGPUs, as their GpuNodes have them."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from gpuvirt.cli.formats import Layout
from gpuvirt.cli.output.repeats import Repeats
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.kube.kinds.gpunode import READY, Gpu, GpuNode, Offered, ReasonStatus, Status
from gpuvirt.model.reasons import ReasonCode, with_code

DEVICE_COLUMNS = (
    *(Column("NODE"), Column("ADDRESS"), Column("NAME", folds=True), Column("MODE")),
    *(Column(name, folds=True, optional=True) for name in ("DRIVER", "USERS", "VGPUS", "OFFERED AS", "REASON")),
    *(Column(name, wide=True) for name in ("NUMA", "VFS", "CONFIG", "VMS", "READY")),
)
VGPU_COLUMNS = (
    *(Column("NODE"), Column("VGPU"), Column("TYPE"), Column("GPU")),
    *(Column(name, folds=True, optional=True) for name in ("USED BY", "REASON")),
    *(Column(name, wide=True) for name in ("OFFERED AS", "VMS")),
)
UNKNOWN = "Unknown"


class NodeDevices(msgspec.Struct, frozen=True):
    """The GPUs of a node, as its agent has reported them last."""

    node: str
    state: str
    """The status of the condition `Ready`: True, False or Unknown."""
    reason: str
    message: str
    gpus: tuple[Gpu, ...]
    resources: tuple[Offered, ...]


class NodeVgpu(msgspec.Struct, frozen=True):
    """A vGPU of a node."""

    node: str
    gpu: str
    id: str
    type: str
    offered_as: str | None
    users: tuple[str, ...]
    virtual_machines: tuple[str, ...]
    reasons: tuple[ReasonStatus, ...]


def devices_of(gpu_nodes: Iterable[GpuNode]) -> list[NodeDevices]:
    """Return the GPUs by node."""
    return [_devices(gpu_node) for gpu_node in gpu_nodes]


def _devices(gpu_node: GpuNode) -> NodeDevices:
    status = gpu_node.status or Status()
    ready = next((condition for condition in status.conditions if condition.type == READY), None)
    return NodeDevices(
        gpu_node.metadata.name,
        *((ready.status, ready.reason, ready.message) if ready is not None else (UNKNOWN, "", "")),
        status.gpus,
        status.resources,
    )


def vgpus_of(gpu_nodes: Iterable[GpuNode]) -> list[NodeVgpu]:
    """Return the vGPUs of all nodes."""
    return [
        NodeVgpu(
            gpu_node.metadata.name,
            gpu.address,
            vgpu.id,
            vgpu.type,
            vgpu.offered_as,
            vgpu.users,
            vgpu.virtual_machines,
            vgpu.reasons,
        )
        for gpu_node in gpu_nodes
        for gpu in (gpu_node.status or Status()).gpus
        for vgpu in gpu.vgpus
    ]


def devices(rows: Iterable[NodeDevices], layout: Layout) -> None:
    """Print the table of GPUs, with the reasons below it."""
    out, table, rows = console(), Table(DEVICE_COLUMNS), tuple(rows)
    for row in rows:
        for gpu in row.gpus:
            table.add(row.node, *_cells(gpu), row.state)
    if any(row.gpus for row in rows):
        table.print(out, layout)
    elif layout.headings:
        out.print("No GPU is reported.")
    for line in dict.fromkeys(line for row in rows for line in _notes(row)) if layout.headings else ():
        say(out, line)


def _cells(gpu: Gpu) -> tuple[str, ...]:
    users = dict.fromkeys((*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)))
    offers = dict.fromkeys((gpu.offered_as, *(vgpu.offered_as for vgpu in gpu.vgpus)))
    types = Counter(vgpu.type for vgpu in gpu.vgpus)
    codes = dict.fromkeys(reason.code for reason in (*gpu.reasons, *_of_vgpus(gpu)))
    reasons = [code for code in codes if code != ReasonCode.CARRIES_VGPUS]
    return (
        gpu.address,
        gpu.name or NOTHING,
        gpu.mode,
        gpu.driver or NOTHING,
        ", ".join(users) or NOTHING,
        ", ".join(f"{count} x {name}" for name, count in types.items()) or NOTHING,
        ", ".join(name for name in offers if name is not None) or NOTHING,
        ", ".join(reasons) or NOTHING,
        NOTHING if gpu.numa_node is None else str(gpu.numa_node),
        NOTHING if gpu.vfs is None else str(gpu.vfs),
        gpu.vgpu_config or NOTHING,
        ", ".join(dict.fromkeys((*gpu.virtual_machines, *(vm for vgpu in gpu.vgpus for vm in vgpu.virtual_machines))))
        or NOTHING,
    )


def _of_vgpus(gpu: Gpu) -> Iterator[ReasonStatus]:
    for vgpu in gpu.vgpus:
        yield from vgpu.reasons


def _notes(row: NodeDevices) -> Iterator[str]:
    """Yield the node's own reasons, and those of its GPUs and vGPUs, each once."""
    if not row.reason:
        yield f"{row.node}: its agent has not reported yet"
    texts = [with_code(row.reason, row.message)] if row.reason and row.state != "True" else []
    for gpu in row.gpus:
        texts += _texts(gpu.address, gpu.reasons)
        for vgpu in gpu.vgpus:
            texts += _texts(vgpu.id, vgpu.reasons)
    repeats = Repeats()
    yield from (f"{row.node}: {text}" for text in map(repeats.fresh, texts) if text)


def _texts(subject: str, reasons: Iterable[ReasonStatus]) -> list[str]:
    return [
        reason.message
        if reason.message.startswith(f"{reason.code}: ")
        else f"{reason.code}: {subject} {reason.message}"
        for reason in reasons
        if reason.code != ReasonCode.CARRIES_VGPUS
    ]


def vgpus(rows: Iterable[NodeVgpu], layout: Layout) -> None:
    """Print the table of vGPUs, with the reasons below it."""
    out, table, rows = console(), Table(VGPU_COLUMNS), tuple(rows)
    for row in rows:
        codes = ", ".join(dict.fromkeys(reason.code for reason in row.reasons))
        users, vms = ", ".join(row.users), ", ".join(row.virtual_machines)
        table.add(row.node, row.id, row.type, row.gpu, users, codes, row.offered_as or NOTHING, vms or NOTHING)
    if rows:
        table.print(out, layout)
    elif layout.headings:
        out.print("No vGPU is reported.")
    for row in rows if layout.headings else ():
        for text in _texts(row.id, row.reasons):
            say(out, f"{row.node}: {text}")
