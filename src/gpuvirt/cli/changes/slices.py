"""`gpuvirt slices --dry-run`: the ResourceSlices by which claims could get this host's GPUs; it publishes none."""

import socket
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuvirt.agent.change.observation import observe
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import Column, Table, console, say
from gpuvirt.cli.parameters import options
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.deviceids import read_device_ids
from gpuvirt.hardware.functions.pci import read_root
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.dra.pool import Pool, Shape, ShapedGpu, pool_of
from gpuvirt.model.dra.shapes import UNKNOWN, LoadedDriver, ShapingHost, Withheld, shapes_of
from gpuvirt.model.dra.slices import slices_of
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.reasons import count_of
from gpuvirt.paths import HostRoots

COLUMNS = (Column("GPU"), Column("SHAPES", folds=True))


def slices(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the slices. This version publishes none.")] = False,
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
    ResourceSlices. gpuvirt is no DRA driver yet, and publishes none. The command changes nothing.
    """
    if not dry_run:
        raise ConfigError("expected --dry-run: this version publishes no slices", where="slices")
    roots = HostRoots.under(host_root)
    here = commandhost.host(commandhost.account(roots, kubelet_dir))
    state = observe(here.change_host, here.inputs).host_state()
    state, shaping = _shaping(here.change_host.kernel, state, options.read_pci_ids(pci_ids, roots))
    gpus, withheld = shapes_of(state, shaping)
    pool = pool_of(gpus)
    written = slices_of(pool, NodeName(node_name or socket.gethostname()), 1)
    if not print_document({"apiVersion": "v1", "kind": "List", "items": written}, output):
        _show(gpus, pool, withheld, shaping.driver, len(written))


def _shaping(kernel: Kernel, state: UnitState, names: PciIds) -> tuple[UnitState, ShapingHost]:
    platform = state.inventory.facts.platform
    if isinstance(platform.vgpu_manager, Unread):
        raise ConfigError("can't be read, so it is not known which driver is loaded", where=platform.vgpu_manager.path)
    driver = LoadedDriver.DATACENTER if platform.nvidia_version is not None else LoadedDriver.NONE
    driver = LoadedDriver.MANAGER if platform.vgpu_manager else driver
    inventory = state.inventory
    ids = read_device_ids(kernel, inventory.facts.functions.values())
    state = replace(state, inventory=replace(inventory, facts=replace(inventory.facts, device_ids=ids)))
    found = {gpu: read_root(kernel, gpu) for gpu in inventory.gpus}
    roots = {gpu: root if isinstance(root, str) else UNKNOWN for gpu, root in found.items()}
    return state, ShapingHost(driver, names, roots)


def _show(
    gpus: Sequence[ShapedGpu], pool: Pool, withheld: Iterable[Withheld], driver: LoadedDriver, slices: int
) -> None:
    out = console()
    about = f"{count_of(len(pool.devices), 'device')} in {count_of(slices, 'slice')}, not published by this version"
    say(out, f"{about}; NVIDIA's driver: {driver}", style="bold")
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
