"""The durability of files: a killed process loses no write, a host without power loses every write without a sync."""

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.agent.node.diskfaults import failing
from tests.explore.scheduler import Scheduler

_flock = fcntl.flock
"""The host's own function, which a schedule replaces."""


class Disk:
    """The files of all processes of one schedule."""

    def __init__(self, folder: Path, scheduler: Scheduler, *, may_lose_power: bool = True) -> None:
        """Without `may_lose_power` no synced files are copied: the copies take longer than the rest of a schedule."""
        self.folder = folder
        self._may_lose_power = may_lose_power
        self.volatile = folder / "run"
        """Folders that a reboot empties."""
        self._scheduler = scheduler
        self._faults = ExitStack()
        self._contents: dict[int, bytes] = {}
        """The synced content of each file, by its inode."""
        self._names: dict[Path, dict[str, int]] = {}
        """The synced entries of each folder."""
        for entry in folder.iterdir():
            shutil.rmtree(entry)
        for name in ("run", "state", "kubelet/device-plugins", "kubelet/pods", "kubelet/pod-resources"):
            (folder / name).mkdir(parents=True)

    def sync(self, fd: int) -> None:
        """Make a file or folder durable; other strands may run meanwhile."""
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  a descriptor's
        self._scheduler.point(f"sync {path.rpartition('/')[2]}")
        self.keep(Path(path))

    def keep(self, path: Path) -> None:
        """Make the present content of a file or folder durable."""
        if not self._may_lose_power:
            return
        if path.is_dir():
            self._names[path] = {file.name: file.stat().st_ino for file in path.iterdir() if file.is_file()}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def lock(self, fd: int, operation: int) -> None:
        """Lock a file; other strands continue during a wait."""
        if operation & fcntl.LOCK_NB or not operation & fcntl.LOCK_EX:
            _flock(fd, operation)
            return
        self._scheduler.wait(lambda: _is_locked(fd))

    def fail(self, folders: Sequence[Path], number: int) -> None:
        """Let the files of these folders fail from now on."""
        self.mend()
        self._faults.enter_context(failing(folders[0], number, *folders[1:]))

    def mend(self) -> None:
        """Let no file fail any more."""
        self._faults.close()

    def lose_power(self) -> None:
        """Restore the last synced state of all files."""
        shutil.rmtree(self.volatile)
        self.volatile.mkdir()
        for folder in {path.parent for path in self.folder.rglob("*") if path.is_file()}:
            kept = {
                name: self._contents[inode]
                for name, inode in self._names.get(folder, {}).items()
                if inode in self._contents
            }
            for path in folder.iterdir():
                if path.is_file():
                    path.unlink()
            for name, content in kept.items():
                (folder / name).write_bytes(content)
            self._names[folder] = {}
            for name, content in kept.items():
                inode = (folder / name).stat().st_ino
                self._names[folder][name], self._contents[inode] = inode, content


def _is_locked(fd: int) -> bool:
    try:
        _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
