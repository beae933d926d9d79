"""The kernel as an unprivileged pod sees it: it may open no VFIO device, and sees its own processes alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from gpuvirt.errors import LeaseUnavailableError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.usage.processes import NAMESPACE
from gpuvirt.paths import HostPath
from tests.explore.seam import ExploredKernel


class UnprivilegedKernel(ExploredKernel):
    """The kernel of an agent with `--plugin-only`."""

    @override
    def readlink(self, path: HostPath, /) -> str:
        return "pid:[4026532000]" if path == NAMESPACE else super().readlink(path)

    @override
    @contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        self._point(f"open group {group}", core=True)
        yield from _refused(f"/dev/vfio/{group}")

    @override
    @contextmanager
    def lease_devices(self, names: Sequence[str], /) -> Iterator[None]:
        self._point(f"open {' '.join(names)}", core=True)
        yield from _refused(f"/dev/vfio/devices/{names[0]}")


def _refused(node: str) -> Iterator[None]:
    raise LeaseUnavailableError(f"{node}: EPERM")
