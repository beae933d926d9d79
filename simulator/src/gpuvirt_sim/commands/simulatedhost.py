"""The simulated host of `gpuvirt sim run`: mounted if possible, else a snapshot in plain files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec
from gpuvirt_sim.mounted.mounterror import MountError
from gpuvirt_sim.mounted.nodes import Nodes
from gpuvirt_sim.programs.executables import VgpuManager, install

ASKED_FOR = "it was started with --snapshot; leave that option out"


def check_mountable() -> None:
    """Raise MountError if libfuse 3 or /dev/fuse is missing."""
    try:
        from gpuvirt_sim.mounted import mounting
    except OSError as error:
        raise MountError(f"{error}; mounting needs libfuse 3 (Debian: apt-get install fuse3)") from error
    mounting.check_fuse()


@contextmanager
def at(root: Path, spec: HostSpec, host: str, manager: VgpuManager, *, snapshot: bool) -> Iterator[None]:
    """Provide a simulated host at `root`, an empty folder; messages call it `host`."""
    refusal = ASKED_FOR if snapshot else _why_not_mounted()
    kernel = build_host(spec, where=host, wait=refusal is None)
    if refusal is not None:
        export(kernel, root)
        install(kernel, root, manager, refusal=refusal)
        yield
        return
    from gpuvirt_sim.mounted.mounting import mounted

    with mounted(kernel, root, Nodes.FILES, manager, Event()):
        yield


def _why_not_mounted() -> str | None:
    try:
        check_mountable()
    except MountError as error:
        return str(error)
    return None
