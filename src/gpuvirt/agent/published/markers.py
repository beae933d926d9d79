"""The files for which NVIDIA's operands wait, such as `vfio-pci-ready`, kept as the node's checks are.

A file exists while its check is needed and passes. `workload-type` has the workload of the node. gpuvirt writes and
removes only these files of the folder. They stay when the agent ends.
"""

import contextlib
import logging
from pathlib import Path

from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Signal
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.validation import ValidatorCheck, ValidatorCondition
from gpuvirt.model.offers.view import NodeView

log = logging.getLogger(__name__)

WORKLOAD_FILE = "workload-type"
HOST_MANAGER = "host-vgpu-manager-ready"
"""Replaces `vgpu-manager-ready` if the vGPU manager is installed on the host itself."""
HOST_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/wsl/lib", "opt/bin")


class Markers:
    """The files in one folder."""

    def __init__(self, folder: Path, system: Path) -> None:
        """`system` is the path of the host's root folder, where the host's own nvidia-smi is looked up."""
        self._folder = folder
        self._system = system
        self._written: tuple[object, ...] | None = None
        self._failed = False

    async def run(self, views: Cell[NodeView]) -> None:
        """Keep the files as the views are, until cancelled."""
        changed = Signal()
        with views.notifying(changed):
            while True:
                self.write(views.get())
                await changed.wait()

    def write(self, view: NodeView) -> None:
        """Write the files by a view; no files are written before the first observation of the host."""
        if not view.host_observed or (view.workload, view.conditions) == self._written:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            replace_file(self._folder / WORKLOAD_FILE, f"{view.workload}\n".encode(), durable=False, mode=0o644)
            for condition in view.conditions:
                self._keep(condition)
        except OSError as error:
            if not self._failed:
                log.warning("the files in %s can't be written, so NVIDIA's operands wait: %s", self._folder, error)
            self._failed = True
        else:
            self._failed = False
            self._written = view.workload, view.conditions

    def _keep(self, condition: ValidatorCondition) -> None:
        names = [f"{condition.check}-ready"]
        if condition.check is ValidatorCheck.VGPU_MANAGER:
            names.append(HOST_MANAGER)
        chosen = names[-1] if self._is_manager_on_host() else names[0]
        for name in names:
            path = self._folder / name
            if name == chosen and condition.needed and condition.holds:
                path.touch(mode=0o644)
            else:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _is_manager_on_host(self) -> bool:
        return any((self._system / folder / "nvidia-smi").is_file() for folder in HOST_FOLDERS)
