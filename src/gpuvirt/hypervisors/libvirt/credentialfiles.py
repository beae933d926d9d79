"""The certificates and the key that libvirt reads, as files that are in memory alone, and end with this process."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108  a folder of links, in one that containers can write to

PREFIX = "gpuvirt-libvirt-"
FIRST = "cacert.pem"


class CredentialFiles:
    """A CA, a client's certificate and its key."""

    def __init__(self, ca: str, certificate: str, key: str) -> None:
        """Raises OSError."""
        texts = {FIRST: ca, "clientcert.pem": certificate, "clientkey.pem": key}
        self._files = {name: _in_memory(name, text) for name, text in texts.items()}

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Provide a folder in which libvirt finds them, for the time of opening a connection; raises OSError.

        It has links to this process's files in memory. A child that is killed meanwhile leaves links to nothing, which
        the next one removes: a host that hangs is asked again and again.
        """
        root = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_left(root)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            for name, fd in self._files.items():
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user
            link = folder / FIRST
            if folder.stat().st_uid == os.geteuid() and link.is_symlink() and not link.exists():
                shutil.rmtree(folder)


def _in_memory(name: str, text: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(fd, len(data := text.encode()))
    os.pwrite(fd, data, 0)
    return fd
