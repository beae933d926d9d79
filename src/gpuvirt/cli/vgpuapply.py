"""Carving by hand: a config applied or asserted, vGPUs made and removed one by one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from gpuvirt.cli import vgpuconfigs, vgpuhost, vgpurender
from gpuvirt.cli.options import Output
from gpuvirt.cli.vgpurender import Result
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.board import Board
from gpuvirt.model.carving import CarveWish, meant
from gpuvirt.model.vgpuentries import Note
from gpuvirt.model.vgpuwish import VgpuWish
from gpuvirt.node import carver
from gpuvirt.node.carver import Look


@dataclass(frozen=True, slots=True)
class Where:
    """The host that a command is about, and how to answer."""

    host_root: Path
    kubelet_dir: Path | None
    output: Output

    @property
    def as_json(self) -> bool:
        """Whether a program is to read the answer."""
        return self.output is Output.JSON


def apply(where: Where, config_file: str | None, selected: str | None, *, dry_run: bool) -> None:
    """Have GPUs carry what a config wants of them; end with 1 where one does not."""
    configs, notes = vgpuconfigs.read_configs(config_file)
    entries = configs[vgpuconfigs.select(configs, selected)]
    here = vgpuhost.host(where.host_root, where.kubelet_dir)
    seen = carver.look(here.site, here.given)
    wishes = vgpuconfigs.wishes(seen, vgpuhost.boards(seen), entries)
    _tell((*notes, *wishes.notes))
    _carry(where, here, seen, {gpu: _named(wish) for gpu, wish in wishes.gpus.items()}, dry_run=dry_run)


def check(where: Where, config_file: str | None, selected: str | None, *, valid_only: bool) -> None:
    """See whether GPUs carry what a config wants of them; end with 1 where one does not."""
    configs, notes = vgpuconfigs.read_configs(config_file)
    entries = configs[vgpuconfigs.select(configs, selected)]
    if valid_only:
        _tell(notes)
        return
    here = vgpuhost.host(where.host_root, where.kubelet_dir)
    seen = carver.look(here.site, here.given)
    wishes = vgpuconfigs.wishes(seen, vgpuhost.boards(seen), entries)
    _tell((*notes, *wishes.notes))
    results = [vgpuhost.would(seen, gpu, _named(wish)) for gpu, wish in wishes.gpus.items()]
    vgpurender.results(results, as_json=where.as_json, dry_run=True)
    if any(result.steps or result.reasons for result in results):
        raise typer.Exit(1)


def create(where: Where, address: str, vgpu_type: str, count: int, *, dry_run: bool) -> None:
    """Make vGPUs on a GPU beside those that it carries; end with 1 where that fails."""
    here = vgpuhost.host(where.host_root, where.kubelet_dir)
    seen = carver.look(here.site, here.given)
    (gpu,) = vgpuhost.gpus_named(seen, [address])
    wished = Counter(_there(seen.board(gpu)))
    board = seen.board(gpu)
    name = meant(vgpu_type, board.known_types) if board is not None else None
    wished[name or vgpu_type] += count
    _carry(where, here, seen, {gpu: CarveWish(wished)}, dry_run=dry_run)


def delete(where: Where, ids: Sequence[str], *, dry_run: bool) -> None:
    """Remove vGPUs that nobody has; end with 1 where one stays."""
    here = vgpuhost.host(where.host_root, where.kubelet_dir)
    seen = carver.look(here.site, here.given)
    boards = vgpuhost.boards(seen)
    owner = {one.id: gpu for gpu, board in boards.items() for one in board.host.live}
    chosen = [VgpuId(one.lower()) for one in dict.fromkeys(ids)]
    if missing := [one for one in chosen if one not in owner]:
        raise typer.BadParameter(f"{missing[0]}: there is no such vGPU on this host (gpuvirt vgpu list)")
    results = [
        vgpuhost.removed(here, owner[one], one, quiet=where.as_json, dry_run=dry_run)
        for one in sorted(chosen, key=lambda one: (owner[one], one))
    ]
    vgpurender.results(results, as_json=where.as_json, dry_run=dry_run)
    if any(result.reasons for result in results):
        raise typer.Exit(1)


def _carry(
    where: Where, here: vgpuhost.Host, seen: Look, wished: Mapping[PciAddress, CarveWish], *, dry_run: bool
) -> None:
    results: list[Result] = []
    for gpu, wish in sorted(wished.items()):
        would = vgpuhost.would(seen, gpu, wish)
        leave = dry_run or not would.steps
        results.append(would if leave else vgpuhost.carved(here, seen, gpu, wish, quiet=where.as_json))
    vgpurender.results(results, as_json=where.as_json, dry_run=dry_run)
    if any(result.reasons for result in results):
        raise typer.Exit(1)


def _there(board: Board | None) -> list[str]:
    return [one.type for one in board.host.live if not isinstance(one.type, Unread)] if board is not None else []


def _named(wish: VgpuWish) -> CarveWish:
    return CarveWish({profile.text: count for profile, count in wish.types.items()}, wish.sizes, wish.scheduler)


def _tell(notes: Iterable[Note]) -> None:
    for note in notes:
        typer.echo(f"gpuvirt: {note.text}", err=True)
