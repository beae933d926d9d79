"""Reads the kubelet's checkpoint at any moment, so that decisions use the newest allocations.

The kubelet writes the checkpoint when it has allocated all devices of a container, before it admits the next one.
Reading the file takes microseconds and no call, so gpuvirt reads it before each destructive step and at each Allocate.
"""

from collections import defaultdict

from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.kubelet import checkpoint
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.allocation.recorded import Recorded
from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.paths import KubeletPaths

Version = tuple[int, int, int, frozenset[PodUid]]
"""The file's inode, time and size, and the ended pods that were left out."""


class RecordedAllocations:
    """The allocations in one kubelet's checkpoint."""

    def __init__(self, paths: KubeletPaths) -> None:
        self.gone: frozenset[PodUid] = frozenset()
        """Pods that have ended, although the checkpoint still has them. The caller finds them, because a missing
        folder alone is no proof: a pod that is being admitted has no folder yet."""
        self._path = paths.checkpoint
        self._last: tuple[Version, Recorded] | None = None

    def read(self) -> Recorded | Unknown:
        """Return the containers that have each device.

        A kubelet first writes its checkpoint when its first plugin registers. Where the file existed before and is
        missing now, the allocations are unknown.
        """
        path, gone = self._path, self.gone
        try:
            # The kubelet replaces the file while the old one still exists, so the new file has another inode.
            found = path.stat()
            version = found.st_ino, found.st_mtime_ns, found.st_size, gone
            if self._last is None or self._last[0] != version:
                self._last = version, _containers(path.read_bytes(), gone)
            return self._last[1]
        except FileNotFoundError:
            missing = f"no {path}, which existed before"
            return {} if self._last is None else Unknown(allocations_unknown(missing))
        except OSError as error:
            return Unknown(allocations_unknown(f"{path}: {error.strerror}"))
        except DamagedError as error:
            return Unknown(allocations_unknown(f"{path}: {error}"))


def _containers(content: bytes, gone: frozenset[PodUid]) -> Recorded:
    found: defaultdict[tuple[ResourceName, DeviceId], set[Consumer]] = defaultdict(set)
    for entry in checkpoint.parse(content).data.pod_device_entries or ():
        uid = PodUid(entry.pod_uid)
        for device in entry.ids() if uid not in gone else ():
            consumer = Consumer(pod_uid=uid, container=entry.container_name)
            found[ResourceName(entry.resource_name), device].add(consumer)
    return {key: frozenset(consumers) for key, consumers in found.items()}


def allocations_unknown(seen: str) -> Reason:
    """Return the reason for a host whose allocations cannot be read."""
    return refusals.allocations_unknown("a device of this host", Seen("", seen))
