"""The table of shared GPUs: a bar for each, its pods, and the largest piece that is free on a node."""

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gpuvirt.cli.formats import Layout
from gpuvirt.cli.output.tables import NOTHING, Column, Table, say
from gpuvirt.model.shares.annotations import LIMITS
from gpuvirt.model.shares.overview import GpuOverview, NodeOverview, PodShare, SharesOverview, short_ids

COLUMNS = (
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
    table = Table((*COLUMNS[:-1], *((USED,) if has_memory else ()), COLUMNS[-1]), below="UNPLACED")
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
            table.add(node.node, *(NOTHING for _ in range(len(COLUMNS) - 2 + has_memory)), "", below=below)
    table.print(out, layout)
    if not layout.headings:
        return
    out.print()
    gpus = f"{found.gpus} GPU{'s' if found.gpus != 1 else ''}"
    largest = max((node.largest for node in found.nodes), default=0)
    say(out, f"{found.free} of {found.units} units are free on {gpus}; the largest free piece has {largest} units.")
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
    """Return a bar of the units in use; a GPU with a share in use has one cell at least, and one with room not all."""
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
