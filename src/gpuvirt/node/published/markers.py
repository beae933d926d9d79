"""The files by which NVIDIA's operands wait for one another: `vfio-pci-ready` and its like, kept as the checks are.

A file is there while its check is needed and holds, and `workload-type` says what the node is for. Only these are
written and removed; other programs' files in the folder are theirs. They stay when the agent ends.
"""

import contextlib
import logging
from pathlib import Path

from gpuvirt.clock import Signal
from gpuvirt.model.offers.validation import Check, Condition
from gpuvirt.model.offers.view import NodeView
from gpuvirt.node.loops.cell import Cell
from gpuvirt.node.store.files import replace_file

log = logging.getLogger(__name__)

WORKLOAD_FILE = "workload-type"
HOST_MANAGER = "host-vgpu-manager-ready"
"""In place of `vgpu-manager-ready` where the manager is installed on the host itself."""
HOST_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/wsl/lib", "opt/bin")


class Markers:
    """Keeps the files in one folder."""

    def __init__(self, folder: Path, system: Path) -> None:
        """`system` is where the host's `/` is seen, by which its own nvidia-smi is found."""
        self._folder = folder
        self._system = system
        self._written: tuple[object, ...] | None = None
        self._failed = False

    async def run(self, views: Cell[NodeView]) -> None:
        """Keep the files as the views are, for ever."""
        changed = Signal()
        with views.telling(changed):
            while True:
                self.write(views.get())
                await changed.wait()

    def write(self, view: NodeView) -> None:
        """Bring the files to what a view says; before the first look at the host nothing is said."""
        if not view.looked or (view.workload, view.conditions) == self._written:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            replace_file(self._folder / WORKLOAD_FILE, f"{view.workload}\n".encode(), durable=False, mode=0o644)
            for condition in view.conditions:
                self._keep(condition)
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written: %s", self._folder, error)
            self._failed = True
        else:
            self._failed = False
            self._written = view.workload, view.conditions

    def _keep(self, condition: Condition) -> None:
        names = [f"{condition.check}-ready"]
        if condition.check is Check.VGPU_MANAGER:
            names.append(HOST_MANAGER)
        chosen = names[-1] if self._manager_is_the_hosts() else names[0]
        for name in names:
            path = self._folder / name
            if name == chosen and condition.needed and condition.holds:
                path.touch(mode=0o644)
            else:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _manager_is_the_hosts(self) -> bool:
        return any((self._system / folder / "nvidia-smi").is_file() for folder in HOST_FOLDERS)
