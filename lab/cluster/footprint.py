"""The folders and files outside the lab's own that its programs and pods create on the computer.

The lab notes which of them do not exist before it starts, and removes only those.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

PLACES = tuple(
    Path(name)
    for name in (
        *("/run/nvidia", "/run/gpuvirt", "/run/cdi", "/run/containerd", "/run/containers"),
        *("/var/lib/gpuvirt", "/var/lib/containers", "/etc/cdi", "/etc/cni"),
        *("/dev/log", "/dev/termination-log"),
    )
)
NOTE = "absent.json"


def note(folder: Path) -> None:
    """Note in the lab's folder what does not exist yet."""
    (folder / NOTE).write_text(json.dumps([str(place) for place in PLACES if not place.exists()]))


def noted(folder: Path) -> Sequence[Path]:
    """Return what did not exist before the lab started; nothing where it has not started."""
    try:
        names: list[str] = json.loads((folder / NOTE).read_text())
    except FileNotFoundError:
        return ()
    return [place for place in PLACES if str(place) in names]


def remove(places: Iterable[Path]) -> None:
    """Remove what the lab has created; a place where something is mounted stays, since a mount is not the lab's."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in places:
        if any(mount == str(place) or mount.startswith(f"{place}/") for mount in mounts):
            continue
        shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
