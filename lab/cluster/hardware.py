"""The node's hardware without tests: a simulated host, mounted until the lab ends.

`python -m lab.cluster.hardware FOLDER HOST` runs in the background. The real `/dev` has the host's VFIO nodes, where
containers get devices from, also those of vGPUs that are created later. The lab's folder of CDI specs is the host's
`/run/cdi`.
"""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.cluster import settings, toolkit
from lab.cluster.leftovers import NULL, VFIO, clear_nodes

NAME = "hardware"
"""The program's name in the lab: its log and its process id are files of this name."""
LOOK_EVERY_S = 0.1


def make_nodes(host: Path) -> None:
    """Create the host's missing VFIO nodes in the real `/dev`; all are `/dev/null`."""
    folder = host / "dev/vfio"  # missing on a host without an IOMMU, such as a worker VM
    for node in folder.iterdir() if folder.is_dir() else ():
        if not (VFIO / node.name).exists():
            os.mknod(VFIO / node.name, stat.S_IFCHR | 0o600, NULL)


@contextmanager
def cdi_folder(folder: Path) -> Iterator[Path]:
    """Show the lab's folder of CDI specs as the mounted host's `/run/cdi`, also in pods."""
    source, shown = folder / settings.CDI, folder / settings.HOST / "run/cdi"
    for path in (source, shown):
        path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", source, shown], check=True)
    try:
        yield source
    finally:
        subprocess.run(["umount", shown], check=True)
        for path in source.iterdir():
            path.unlink()


@contextmanager
def mounted(host: Path, name: str) -> Iterator[None]:
    """Mount a simulated host with its VFIO nodes; raise OSError."""
    host.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "gpuvirt",
        "sim",
        "mount",
        "--host",
        name,
        "--vgpu-manager",
        "container",
        str(host),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None or "is mounted at" not in server.stdout.readline():
                raise OSError(f"{name} is not mounted at {host}; gpuvirt sim mount says why, above")
            clear_nodes()
            VFIO.mkdir()
            yield
        finally:
            server.terminate()
            clear_nodes()


def main(folder: Path, name: str) -> None:
    """Mount the host, and keep its nodes in `/dev`, until SIGTERM."""
    host = folder / settings.HOST
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), mounted(host, name), cdi_folder(folder) as specs:
        if found := toolkit.gpus(host):
            toolkit.write_spec(specs, found)
        print(f"{name} is the node's hardware", flush=True)
        while True:
            with suppress(FileNotFoundError):  # nodes appear and vanish meanwhile
                make_nodes(host)
            time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
