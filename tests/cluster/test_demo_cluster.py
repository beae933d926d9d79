"""`make demo-cluster`, as a user types it: what it prints works line by line, and `make lab-down` leaves nothing."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from lab.cluster import footprint
from lab.cluster.cluster import Cluster

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 540
COMMAND = "    "
"""How lines begin that are to be typed."""

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.xdist_group("cluster"),
]


class User:
    """A user with a shell in the repository."""

    def __init__(self) -> None:
        self._before = ""

    def types(self, line: str) -> "subprocess.CompletedProcess[str]":
        """Run a line; what it exports stays for the next ones."""
        if line.startswith("export "):
            self._before = f"{line}\n"
        environment = dict(os.environ)  # noqa: TID251  the user's
        return subprocess.run(
            ["/bin/bash", "-c", f"{self._before}{line}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    def makes(self, target: str) -> str:
        done = self.types(f"make {target}")
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture
def stopped(running_lab: Cluster, images: Mapping[str, Path]) -> Iterator[Cluster]:
    """The lab of the other tests, stopped while the demo's runs."""
    running_lab.down()
    try:
        yield running_lab
    finally:
        running_lab.down()
        running_lab.up()
        for archive in images.values():
            running_lab.import_image(archive)


def present() -> set[Path]:
    """Return what exists of the places that the lab's programs use."""
    return {place for place in footprint.PLACES if place.exists()}


def processes(cluster: Cluster) -> Sequence[str]:
    """Return the commands of the lab's programs, and of simulators that are mounted in its folder."""

    def command(folder: Path) -> str:
        with suppress(OSError):
            return (folder / "cmdline").read_text().replace("\0", " ")
        return ""

    found = (command(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [line for line in found if str(cluster.folder) in line]


def has(*texts: str) -> Callable[[str], bool]:
    return lambda output: all(text in output for text in texts)


EXPECTED: Mapping[str, Callable[[str], bool]] = {
    "gpuvirt status": has("Ready: gpuvirt in namespace gpu-operator, 1 node with GPUs", "4 nvidia.com/NVIDIA_A10-12Q"),
    "gpuvirt devices": has("0000:65:00.0", "0000:ca:00.0", "2 x NVIDIA A10-12Q"),
    "kubectl get gpunodes": has("node01", "vgpu"),
    "kubectl get kubevirt": has('"mdevNameSelector":"NVIDIA A10-12Q"', '"externalResourceProvider":true'),
    "gpuvirt why pod/five-vgpus": has("TooFewDevices", "request at most 4"),
    "gpuvirt why node/node01": has("default/five-vgpus", "TooFewDevices"),
    "gpuvirt shares": has("900/1000", "default/share-1 300, default/share-2 600", "1100 of 2000 units are free"),
}
"""The expected outputs of commands of the walk; the other commands report success by their exit code."""


def test_a_user_types_what_the_demo_prints_and_ends_it(stopped: Cluster) -> None:
    before = present()
    user = User()
    shown = user.makes("demo-cluster")
    lines = [line.removeprefix(COMMAND) for line in shown.splitlines() if line.startswith(COMMAND)]
    assert {name for name in EXPECTED if not any(line.startswith(name) for line in lines)} == set()
    for line in lines:
        done = user.types(line)
        is_blocked = line.startswith("gpuvirt why")
        assert done.returncode == (1 if is_blocked else 0), f"{line}\n{done.stdout}\n{done.stderr}"
        for name, is_shown in EXPECTED.items():
            assert not line.startswith(name) or is_shown(done.stdout), f"{line}\n{done.stdout}"
    again = user.types("make demo-cluster")
    assert (again.returncode, again.stdout) == (0, shown)
    assert "runs already" in again.stderr
    user.makes("lab-down")
    assert processes(stopped) == []
    assert not stopped.folder.exists()
    assert present() == before
    assert str(stopped.folder) not in Path("/proc/mounts").read_text()
