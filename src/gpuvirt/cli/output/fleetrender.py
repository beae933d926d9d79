"""The output about nodes of a cluster: their GPUs and vGPUs, as their GpuNodes have them, and their shared GPUs."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from gpuvirt.cli.formats import Layout
from gpuvirt.cli.output.tables import NOTHING, Column, Repeats, Table, console, say
from gpuvirt.kube.kinds.gpunode import READY, Gpu, GpuNode, Offered, ReasonStatus, Status
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.offers.ondemand.typesannotation import with_type
from gpuvirt.model.reasons import ReasonCode, count_of, with_code
from gpuvirt.model.shares.annotations import LIMITS
from gpuvirt.model.shares.overview import GpuOverview, NodeOverview, PodShare, SharesOverview, short_ids

SHARE_COLUMNS = (
    Column("NODE"),
    Column("GPU"),
    Column("USE"),
    Column("UNITS"),
    Column("FREE"),
    Column("ENFORCED", folds=True),
    Column("PODS", folds=True, optional=True),
)
USED = Column("USED", folds=True)
"""After ENFORCED, where a pod has a limit that its agent has reported."""
CELLS = 10
"""The cells of a bar."""
FULL_AT = 0.9
"""A GPU with more than this in use is shown in yellow, a full one in red."""


def print_shares(
    out: Console,
    found: SharesOverview,
    layout: Layout = Layout(),  # noqa: B008  frozen
) -> None:
    """Print the table, and below it what is free in the cluster."""
    if not found.nodes and layout.headings:
        say(out, "No node shares GPUs. A node shares the GPUs that are in mode shared; see docs/sharing.md.")
    if not found.nodes:
        return
    names = short_ids(gpu.gpu for node in found.nodes for gpu in node.gpus)
    has_memory = any(share.limit_mib is not None for node in found.nodes for gpu in node.gpus for share in gpu.pods)
    table = Table((*SHARE_COLUMNS[:-1], *((USED,) if has_memory else ()), SHARE_COLUMNS[-1]), below="UNPLACED")
    for node in found.nodes:
        below = tuple(_below(node))
        for number, gpu in enumerate(node.gpus):
            last = number == len(node.gpus) - 1
            table.add(
                node.node,
                gpu.gpu if layout.wide else names[gpu.gpu],
                bar(gpu),
                f"{gpu.used}/{gpu.units}",
                str(gpu.free),
                enforced(gpu.pods),
                *((memory(gpu.pods),) if has_memory else ()),
                ", ".join(map(_share, gpu.pods)),
                below=below if last else (),
            )
        if not node.gpus:
            table.add(node.node, *(NOTHING for _ in range(len(SHARE_COLUMNS) - 2 + has_memory)), "", below=below)
    table.print(out, layout)
    if not layout.headings:
        return
    out.print()
    gpus = count_of(found.gpus, "GPU")
    largest = count_of(max((node.largest for node in found.nodes), default=0), "unit")
    say(out, f"{found.free} of {found.units} units are free on {gpus}; the largest free piece has {largest}.")
    say(out, _limits(found), style="dim")


def enforced(pods: Sequence[PodShare]) -> str:
    """Return what limits the pods of a GPU; where it differs, how many of them have which limit."""
    counts = Counter(share.enforcement for share in pods)
    if len(counts) < 2:
        return next(iter(counts), NOTHING)
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def memory(pods: Sequence[PodShare]) -> str:
    """Return the memory that the pods of a GPU with a limit use, and their limits: `4000 of 9830 MiB`.

    A pod whose use is unknown counts with its limit alone: `4000+ of 9830 MiB`.
    """
    limited = [share for share in pods if share.limit_mib is not None]
    if not limited:
        return NOTHING
    known = [share.used_mib for share in limited if share.used_mib is not None]
    used = f"{sum(known)}{'+' if len(known) < len(limited) else ''}" if known else "?"
    return f"{used} of {sum(share.limit_mib or 0 for share in limited)} MiB"


def _limits(found: SharesOverview) -> str:
    by = {share.enforcement for node in found.nodes for gpu in node.gpus for share in gpu.pods}
    if not by & set(LIMITS):
        return "Shares are accounting: nothing keeps a container from using more of its GPU."
    if by <= set(LIMITS):
        return "Each share has a limit; docs/sharing.md describes what each value of ENFORCED can't limit."
    return "Pods without a limit can use more of their GPU than their share."


def bar(gpu: GpuOverview) -> Text:
    """Return a bar of the units in use; a GPU with a share in use has one cell at least, and one with room not all.

    A GPU without units, which is withheld, has no bar.
    """
    if not (gpu.units or gpu.used):
        return Text(NOTHING)
    use = min(gpu.used / gpu.units, 1.0) if gpu.units else 1.0
    cells = round(use * CELLS)
    cells = min(max(cells, 1 if gpu.used else 0), CELLS if gpu.used >= gpu.units else CELLS - 1)
    filled, empty = ("█", "░") if (sys.stdout.encoding or "").lower().startswith("utf") else ("#", ".")
    style = "red" if gpu.free == 0 else "yellow" if use > FULL_AT else "green"
    return Text.assemble((filled * cells, style), (empty * (CELLS - cells), "dim"))


def _below(node: NodeOverview) -> list[str]:
    below = [f"no unit is free: {node.node} {node.away}"] if node.away is not None else []
    if any(share.enforcement != node.enforcement for gpu in node.gpus for share in gpu.pods):
        below.append(
            f"new pods of {node.node}: {node.enforcement}; running pods keep the enforcement that they started with"
        )
    if node.unplaced:
        pods = ", ".join(map(_share, node.unplaced))
        below.append(f"their GPUs are not known yet, so they count on each GPU of {node.node}: {pods}")
    return below


def _share(share: PodShare) -> str:
    return f"{share.pod} {share.units}"


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
        out.print("No GPU is reported." if rows else "No node with an agent is listed.")
    for line in dict.fromkeys(line for row in rows for line in _notes(row)) if layout.headings else ():
        say(out, line)


def _cells(gpu: Gpu) -> tuple[str, ...]:
    users = dict.fromkeys((*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)))
    is_on_demand = gpu.desired_mode == DesiredMode.ON_DEMAND
    offered = ((gpu.offered_as, None), *((vgpu.offered_as, vgpu.type if is_on_demand else None) for vgpu in gpu.vgpus))
    offers = dict.fromkeys(with_type(name, vgpu_type) for name, vgpu_type in offered if name is not None)
    types = Counter(vgpu.type for vgpu in gpu.vgpus)
    against = (*gpu.reasons, *(reason for vgpu in gpu.vgpus for reason in vgpu.reasons))
    codes = dict.fromkeys(reason.code for reason in against)
    reasons = [code for code in codes if code != ReasonCode.CARRIES_VGPUS]
    return (
        gpu.address,
        gpu.name or NOTHING,
        gpu.mode,
        gpu.driver or NOTHING,
        ", ".join(users) or NOTHING,
        ", ".join(f"{count} x {name}" for name, count in types.items()) or NOTHING,
        ", ".join(offers) or NOTHING,
        ", ".join(reasons) or NOTHING,
        NOTHING if gpu.numa_node is None else str(gpu.numa_node),
        NOTHING if gpu.vfs is None else str(gpu.vfs),
        gpu.vgpu_config or NOTHING,
        ", ".join(dict.fromkeys((*gpu.virtual_machines, *(vm for vgpu in gpu.vgpus for vm in vgpu.virtual_machines))))
        or NOTHING,
    )


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
