"""Archives for tests: a host packed in memory."""

import io
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuvirt.archive import FORMAT, HOST, ArchiveManifest, Entry, NotRead, pack
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.archives.hostcopy import HostCopy, copy_host
from gpuvirt_sim.archives.unpacking import Opened, unpack
from gpuvirt_sim.clock import BEGINNING

MANIFEST = ArchiveManifest(
    format=FORMAT, gpuvirt="0.1.0", at=BEGINNING, node="node-1", names_hidden=False, privileged=True
)


def packed(copy: HostCopy, more: Mapping[str, Entry] | None = None) -> bytes:
    unread = tuple(NotRead(entry.path, entry.errno, entry.detail) for entry in copy.unread)
    members = {f"{HOST}{path}": entry for path, entry in copy.members.items()} | dict(more or {})
    return pack("gpuvirt-support-node-1", msgspec.structs.replace(MANIFEST, unread=unread), members)


def opened(kernel: Kernel) -> Opened:
    return unpack(io.BytesIO(packed(copy_host(kernel))))


def unpack_with_tar(archive: bytes, folder: Path) -> None:
    """Unpack an archive as a user does. The tarfile of Debian 12's Python has no filter for what it extracts."""
    subprocess.run(["tar", "-xz", "-C", str(folder)], input=archive, check=True)  # noqa: S607  the user's own
