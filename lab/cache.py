"""The folder that keeps downloads and builds between runs; each gets its name only when it is complete."""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT = "/var/tmp/gpuvirt-lab"  # noqa: S108  kept over reboots on purpose; its owner is checked


def cache_root() -> Path:
    """Return the folder of all labs, `$GPUVIRT_LAB_CACHE`; create it where it is missing."""
    root = Path(os.environ.get("GPUVIRT_LAB_CACHE", DEFAULT))
    root.mkdir(parents=True, exist_ok=True, mode=0o755)
    if root.stat().st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user, but its programs would run as this user")
    return root


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs from preparing the same folder at the same time."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a run that has not ended holds the lock of a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return `target`; where it is missing, `make` fills a folder beside it.

    The folder gets its name when it is complete, so an interrupted run leaves nothing that a later run would use. Of
    several processes that call this at once, one makes the folder, and the others wait.
    """
    if target.exists():
        return target
    alone = target.with_name(f"{target.name}-alone")
    alone.mkdir(parents=True, exist_ok=True)
    with locked(alone):
        return target if target.exists() else _made(target, make)


def _made(target: Path, make: Callable[[Path], None]) -> Path:
    for left in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(left)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    beside.chmod(0o755)
    try:
        make(beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def digest(*texts: str) -> str:
    """Return a short hash of these texts, as the name of a build from them."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def say(what: str) -> None:
    """Print a message about a build to standard error."""
    print(f"lab: {what}", file=sys.stderr, flush=True)
