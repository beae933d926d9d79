"""`gpuvirt slices --dry-run`: the ResourceSlices by which claims could get this host's GPUs; it publishes none."""

import socket
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.claims.shaping import with_shaping
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import Column, Table, console, say
from gpuvirt.cli.parameters import options
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.claims import PREPARED_SHAPES, Shape
from gpuvirt.model.dra.pool import Pool, ShapedGpu, Withheld, pool_of
from gpuvirt.model.dra.shapes import LoadedDriver, shapes_of
from gpuvirt.model.dra.slices import content_of, slices_of
from gpuvirt.model.reasons import count_of
from gpuvirt.paths import HostRoots

COLUMNS = (Column("GPU"), Column("SHAPES", folds=True))


def slices(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the slices. The agent publishes them.")] = False,
    node_name: Annotated[
        str, typer.Option(envvar="NODE_NAME", help="The node's name. Default: the host's.", show_default=False)
    ] = "",
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    pci_ids: options.PciIdsFile = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Show in which shapes claims (DRA) could get this host's GPUs.

    A GPU is offered in all the shapes that its host's driver allows. Counters keep the shapes apart: a scheduler that
    gives a claim one shape gives no claim another one of the same GPU. With -o yaml or json, the command prints the
    ResourceSlices. On a node in mode claims the agent publishes the shapes that it prepares, so far passthrough. The
    command changes nothing.
    """
    if not dry_run:
        raise ConfigError("expected --dry-run: the agent publishes slices, on a node in mode claims", where="slices")
    roots = HostRoots.under(host_root)
    here = commandhost.host(commandhost.account(roots, kubelet_dir))
    state = observe(here.change_host, here.inputs).host_state()
    found = with_shaping(here.change_host.kernel, state, options.read_pci_ids(pci_ids, roots))
    if isinstance(found, Unread):
        raise ConfigError("can't be read, so it is not known which driver is loaded", where=found.path)
    state, shaping = found
    gpus, withheld = shapes_of(state, shaping)
    pool = pool_of(gpus)
    written = slices_of(content_of(pool), NodeName(node_name or socket.gethostname()), 1)
    if not print_document({"apiVersion": "v1", "kind": "List", "items": written}, output):
        _show(gpus, pool, withheld, shaping.driver, len(written))


def _show(
    gpus: Sequence[ShapedGpu], pool: Pool, withheld: Iterable[Withheld], driver: LoadedDriver, slices: int
) -> None:
    out = console()
    about = f"{count_of(len(pool.devices), 'device')} in {count_of(slices, 'slice')}"
    prepared = ", ".join(sorted(PREPARED_SHAPES))
    say(out, f"{about}; this version publishes {prepared}; NVIDIA's driver: {driver}", style="bold")
    table = Table(COLUMNS)
    for gpu in gpus:
        table.add(gpu.address, ", ".join(gpu.shapes))
    if gpus:
        out.print()
        table.print(out)
        out.print()
    for sizes in dict.fromkeys(gpu.sizes for gpu in gpus if Shape.VGPU in gpu.shapes):
        say(out, ", ".join(f"{size.most} x {size.name}" for size in sizes), head="vgpu, one of: ")
    against: dict[str, list[str]] = {}
    for left in withheld:
        against.setdefault(left.why, []).append(f"{left.gpu} as {left.shape}")
    for why, lacking in against.items():
        say(out, f"{', '.join(lacking)}: {why}", head="not: ")
