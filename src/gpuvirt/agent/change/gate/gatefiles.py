"""The files of a host's gates: any process reads each gate's state from its locks and its record."""

import fcntl
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gatelock import GateFailedError, UnitBlockedError, UnitBusyError, opened, try_lock
from gpuvirt.agent.change.gate.gaterecord import ALLOCATABLE, Found, GateOwner, GateRecord, GateState
from gpuvirt.agent.store.files import replace_file

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class GateFiles(msgspec.Struct, frozen=True):
    """The files of one host's gates."""

    folder: Path

    def read(self, slot: str) -> Found:
        """Return the record of a slot. Raises GateFailedError, as all methods of a gate do."""
        return gaterecord.decode(_content(self._name_of(slot, "json")), boot_id())

    def write(self, slot: str, record: GateRecord) -> None:
        """Write the record of a slot that this process has locked."""
        path = self.path_of(slot, "json")
        try:
            replace_file(path, gaterecord.encode(record), durable=False)
        except OSError as error:
            raise GateFailedError(path, error) from error

    def state(self, slot: str) -> GateState:
        """Return the state of a gate; this tries both of its locks for a moment."""
        is_locked, has_owner = self._is_taken(slot, "lock"), self._is_taken(slot, "owner")
        if is_locked and not has_owner:  # the change may have ended between the two tries
            is_locked = self._is_taken(slot, "lock")
        return gaterecord.state_of(self.read(slot), is_locked=is_locked, has_owner=has_owner)

    def _is_taken(self, slot: str, kind: str) -> bool:
        with opened(self._name_of(slot, kind)) as fd:
            return not try_lock(fd, fcntl.LOCK_SH)

    def states(self) -> Mapping[str, GateState]:
        """Return the states of all gates that any process has used since boot."""
        return {slot: self.state(slot) for slot in self._slots("lock")}

    def states_by_record(self) -> Mapping[str, GateState]:
        """Return the same as `states`, but try no lock where the record shows no change under way."""
        found = {slot: self.read(slot) for slot in self._slots("json")}
        return {
            slot: record.state if isinstance(record, GateRecord) and record.state in ALLOCATABLE else self.state(slot)
            for slot, record in found.items()
        }

    def _slots(self, kind: str) -> list[str]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []  # unknown: nothing, no gate was ever used
        except OSError as error:
            raise GateFailedError(self.folder, error) from error
        return sorted(name.removesuffix(f".{kind}") for name in names if name.endswith(f".{kind}"))

    def busy(self, unit: str, slot: str) -> UnitBusyError:
        """Return the error for a gate that another process has locked."""
        found, path = self.read(slot), self.path_of(slot, "owner")
        if isinstance(found, GateRecord) and found.state is GateState.DRAINING:
            return UnitBusyError(f"{unit}: another process waits to change these functions ({path}): {found.intent}")
        return UnitBusyError(
            f"{unit}: another process is changing these functions ({path}), step: {self.step_of(slot)}"
        )

    def blocked_by_kernel(self, unit: str, slot: str) -> UnitBlockedError:
        """Return the error for a gate that stays locked by a blocked step of a process that has ended."""
        step, path = self.step_of(slot), self.path_of(slot, "lock")
        return UnitBlockedError(f"{unit}: the kernel blocks a change whose process has ended ({path}): {step}", step)

    def step_of(self, slot: str) -> str:
        """Return the last step that was begun in a slot."""
        found = self.read(slot)
        return (found.intent if isinstance(found, GateRecord) else None) or "an unknown step"

    def path_of(self, slot: str, kind: str) -> Path:
        """Return the path of a gate's file; `kind` is `lock`, `owner` or `json`."""
        return self.folder / f"{slot}.{kind}"

    def _name_of(self, slot: str, kind: str) -> str:
        """Return the same as text, which takes a tenth of the time: each Allocate needs two for each slot."""
        return f"{self.folder}/{slot}.{kind}"


def _content(path: str) -> bytes | None:
    """Return the content of a file, None where it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None  # unknown: nothing, the file does not exist
    except OSError as error:
        raise GateFailedError(path, error) from error


@cache
def boot_id() -> str:
    """Return the id of the current boot."""
    return BOOT_ID.read_text().strip()


@cache
def this_process() -> GateOwner:
    """Return this process as the owner of changes."""
    stat = Path("/proc/self/stat").read_bytes()
    return GateOwner(os.getpid(), int(stat.rpartition(b")")[2].split()[19]))
