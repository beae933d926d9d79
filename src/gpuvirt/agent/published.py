"""The files that an agent keeps for other programs: its view, CDI specs, and those for which NVIDIA's operands wait."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers import cdi
from gpuvirt.model.offers.validation import ValidatorCheck, ValidatorCondition
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, nodeproblems

log = logging.getLogger(__name__)

WORKLOAD_FILE = "workload-type"
HOST_MANAGER = "host-vgpu-manager-ready"
"""Replaces `vgpu-manager-ready` if the vGPU manager is installed on the host itself."""
HOST_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/wsl/lib", "opt/bin")


class Markers:
    """The files for which NVIDIA's operands wait, such as `vfio-pci-ready`, kept as the node's checks are.

    A file exists while its check is needed and passes. `workload-type` has the workload of the node. gpuvirt writes and
    removes only these files of the folder. They stay when the agent ends.
    """

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


CDI_FOLDER = "cdi"
"""The folder of CDI specs, relative to the host's `/run`."""


class CdiFiles:
    """gpuvirt's files in the folder of CDI specs, which other programs also use."""

    def __init__(self, folder: Path, clock: Clock, intervals: Intervals) -> None:
        self._folder = folder
        self._clock = clock
        self._intervals = intervals

    async def run(self, views: Cell[NodeView], observe: Callable[[Reason | None], None]) -> None:
        """Keep the files until cancelled. They stay: pods that start during an upgrade of gpuvirt need them."""
        changed = Signal()
        with views.notifying(changed):
            while True:
                if views.get().host_observed:
                    observe(self.write(views.get()))
                pause_s = until_tick_s(self._clock.monotonic_s(), self._intervals.state_file_s)
                await changed.wait_for(self._clock, pause_s)

    def write(self, view: NodeView) -> Reason | None:
        """Make the files as a view is, now; return why they can't be written."""
        return self._converge(cdi.specs(view))

    def _converge(self, desired: Mapping[str, bytes]) -> Reason | None:
        """Write and remove files until they are as desired. Equal files are not written, since runtimes watch them."""
        try:
            for name, content in desired.items():
                path = self._folder / name
                if _content(path) != content:
                    replace_file(path, content, durable=False, mode=0o644)
                    log.info("wrote the CDI spec %s, since the offered devices have changed", path)
            for path in self._folder.glob(f"{cdi.PREFIX}*.json"):
                if path.name not in desired:
                    path.unlink(missing_ok=True)
        except OSError as error:
            return nodeproblems.cdi_not_written(self._folder, str(error))
        return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


VIEW_FILE = "gpuvirt/node.json"
"""The path of the view, relative to the host's `/run`."""

VIEW_LIFE_S = 90.0
"""The age from which on a view has no running agent. A running agent renews it every 30 seconds."""


class StateFile:
    """The file with the agent's view, for admins and programs on the host."""

    def __init__(self, path: Path, clock: Clock, intervals: Intervals) -> None:
        self._path = path
        self._clock = clock
        self._intervals = intervals
        self._failed = False

    async def run(self, views: Cell[NodeView]) -> None:
        """Write each view, and the same one again as a sign of life, until cancelled; remove the file at the end."""
        changed = Signal()
        with views.notifying(changed):
            try:
                while True:
                    self._write(views.get())
                    pause_s = until_tick_s(self._clock.monotonic_s(), self._intervals.state_file_s)
                    await changed.wait_for(self._clock, pause_s)
            finally:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _write(self, view: NodeView) -> None:
        try:
            written = replace(view, at=self._clock.now(), at_s=self._clock.monotonic_s())
            content = msgspec.json.format(msgspec.json.encode(written), indent=1)
            replace_file(self._path, content, durable=False, mode=0o644)
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written, so commands on this host don't see the agent: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False


def read_view(path: Path, now_s: float, boot_id: str | None, procs: Iterable[Path]) -> NodeView | None:
    """Return the view of a running agent; None if there is no view, or none of this boot and of the last 90 seconds.

    `now_s` is by the host's monotonic clock, as the view's time of a boot: the wall clock may have stepped since.
    `procs` are the `/proc` folders in which a running agent is visible: a killed agent leaves its file behind.
    """
    try:
        view = from_json(path.read_bytes(), NodeView)
    except (OSError, DamagedError):
        return None
    is_late = view.at_s is not None and now_s - view.at_s > VIEW_LIFE_S
    fresh = not is_late and view.boot_id == boot_id
    pid = view.agent.pid if view.agent is not None else None
    return view if fresh and any((proc / str(pid)).exists() for proc in procs) else None
