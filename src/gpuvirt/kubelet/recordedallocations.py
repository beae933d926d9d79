"""Reads the kubelet's record of its allocations at any moment, so that a decision follows from the newest one.

The kubelet writes the record when it has allocated all devices of a container, before it admits the next. Reading the
file is a matter of microseconds and asks nobody, so it can be done before each destructive step and at each Allocate.
"""

from collections import defaultdict

from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.kubelet import checkpoint
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.allocation.recorded import Recorded
from gpuvirt.model.reasons import Seen, refusals
from gpuvirt.paths import KubeletPaths

Version = tuple[int, int, int, frozenset[PodUid]]
"""The file's inode, time and size, and the pods that were gone."""


class RecordedAllocations:
    """The record of one kubelet."""

    def __init__(self, paths: KubeletPaths) -> None:
        self.gone: frozenset[PodUid] = frozenset()
        """Pods that have ended, though the record still has them. A pod that is being admitted has no folder yet, so
        the pods' folders alone don't tell."""
        self._path = paths.checkpoint
        self._last: tuple[Version, Recorded] | None = None

    def read(self) -> Recorded | Unknown:
        """Return which containers have which devices.

        A kubelet writes its first record when its first plugin registers. A record that was there and is missing is
        unknown.
        """
        path, gone = self._path, self.gone
        try:
            # The kubelet replaces the file, so the next one has another inode as long as this one is there.
            found = path.stat()
            version = found.st_ino, found.st_mtime_ns, found.st_size, gone
            if self._last is None or self._last[0] != version:
                self._last = version, _containers(path.read_bytes(), gone)
            return self._last[1]
        except FileNotFoundError:
            return {} if self._last is None else _unknown(f"no {path}, which was there before")
        except OSError as error:
            return _unknown(f"{path}: {error.strerror}")
        except DamagedError as error:
            return _unknown(f"{path}: {error}")


def _containers(content: bytes, gone: frozenset[PodUid]) -> Recorded:
    found: defaultdict[tuple[ResourceName, DeviceId], set[Consumer]] = defaultdict(set)
    for entry in checkpoint.parse(content).data.pod_device_entries or ():
        uid = PodUid(entry.pod_uid)
        for device in entry.ids() if uid not in gone else ():
            consumer = Consumer(pod_uid=uid, container=entry.container_name)
            found[ResourceName(entry.resource_name), device].add(consumer)
    return {key: frozenset(consumers) for key, consumers in found.items()}


def _unknown(seen: str) -> Unknown:
    return Unknown(refusals.allocations_unknown("a device of this host", Seen("", seen)))
