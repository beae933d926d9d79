"""The checks of a node for containers: the programs they run, the files they write, and their failures."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.agent.validator import Marker, await_marker, driver_check, toolkit_check, validate
from gpuvirt.hardware.access.tools import Ended
from gpuvirt.hardware.programs.containerdriver import (
    DriverRoots,
    FoundDriver,
    NotReadyError,
    check_toolkit,
    find_driver,
)
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import SimClock
from tests.cli.commandline import GPUVIRT, PATH, ran

FINE, BROKEN = Ended(0, "GPU 0: NVIDIA A10\n", ""), Ended(9, "", "couldn't communicate with the NVIDIA driver")
ON_HOST = HostPath("/opt/driver")


class Node:
    """A host and a driver's container, with an nvidia-smi that ends as the test sets."""

    def __init__(self, folder: Path) -> None:
        self.roots = DriverRoots(folder / "host", folder / "driver", ON_HOST, folder / ".driver-ctr-ready")
        self.ends = FINE
        self.asked: list[str] = []

    def install(self, root: Path) -> None:
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin/nvidia-smi").touch()

    def start(self) -> None:
        assert self.roots.started is not None
        self.roots.started.touch()

    def run(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        assert timeout_s is not None
        self.asked.append(command[1])
        return self.ends

    def find(self) -> FoundDriver:
        return find_driver(self.roots, self.run)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_driver_on_the_host_takes_precedence_over_a_container(node: Node) -> None:
    node.install(node.roots.system)
    node.install(node.roots.driver)
    assert node.find().lines.splitlines() == [
        "IS_HOST_DRIVER=true",
        "NVIDIA_DRIVER_ROOT=/",
        "DRIVER_ROOT_CTR_PATH=/host",
        "NVIDIA_DEV_ROOT=/",
        "DEV_ROOT_CTR_PATH=/host",
    ]
    assert node.asked == [str(node.roots.system)]


@pytest.mark.parametrize(("own", "lines"), [(True, ("/opt/driver", "/driver-root")), (False, ("/", "/host"))])
def test_a_driver_in_a_container_is_reported_by_its_path_on_the_host(
    node: Node, own: bool, lines: tuple[str, str]
) -> None:
    node.install(node.roots.driver)
    node.start()
    if own:
        (node.roots.driver / "dev").mkdir()
    found = dict(line.split("=") for line in node.find().lines.splitlines())
    assert (found["IS_HOST_DRIVER"], found["NVIDIA_DRIVER_ROOT"]) == ("false", "/opt/driver")
    assert found["DRIVER_ROOT_CTR_PATH"] == "/driver-root"
    assert (found["NVIDIA_DEV_ROOT"], found["DEV_ROOT_CTR_PATH"]) == lines


def test_the_driver_check_waits_for_the_drivers_container(node: Node) -> None:
    node.install(node.roots.driver)
    with pytest.raises(NotReadyError, match="driver container is not ready yet"):
        node.find()
    assert node.asked == []


def test_a_driver_whose_nvidia_smi_fails_is_not_ready(node: Node) -> None:
    node.ends = BROKEN
    node.install(node.roots.system)
    with pytest.raises(NotReadyError, match=r"driver that is installed on the host.*couldn't communicate"):
        node.find()


def test_a_missing_driver_is_reported_with_both_roots(node: Node) -> None:
    node.start()
    with pytest.raises(NotReadyError, match="no nvidia-smi on the host or in /opt/driver"):
        node.find()


def test_the_toolkit_is_ready_when_its_runtime_has_injected_a_gpu(node: Node) -> None:
    def run(command: Sequence[str], timeout_s: float | None) -> Ended:  # noqa: ARG001
        assert command[0] != "chroot"
        return node.ends

    with pytest.raises(NotReadyError, match="its runtime has given it no GPU"):
        check_toolkit(run, lambda _: False)
    check_toolkit(run, lambda _: True)
    node.ends = BROKEN
    with pytest.raises(NotReadyError, match="do not work"):
        check_toolkit(run, lambda _: True)


async def test_a_check_is_repeated_until_it_passes_and_then_writes_its_marker(node: Node, tmp_path: Path) -> None:
    marker, clock = Marker(tmp_path / "run/driver-ready"), SimClock()
    marker.write("of an hour ago")
    checking = asyncio.ensure_future(  # noqa: TID251
        validate(driver_check(node.roots, node.run), marker, clock, wait=True)
    )
    await clock.advance(20)
    assert not marker.exists
    node.install(node.roots.driver)
    node.start()
    await clock.advance(5)
    await checking
    assert "NVIDIA_DRIVER_ROOT=/opt/driver" in marker.path.read_text()


async def test_a_check_without_waiting_is_not_repeated(node: Node, tmp_path: Path) -> None:
    marker = Marker(tmp_path / "driver-ready")
    with pytest.raises(NotReadyError):
        await validate(driver_check(node.roots, node.run), marker, SimClock(), wait=False)
    assert not marker.exists


async def test_the_wait_for_a_marker_ends_when_the_file_exists(tmp_path: Path) -> None:
    marker, clock = Marker(tmp_path / "toolkit-ready"), SimClock()
    waiting = asyncio.ensure_future(await_marker(marker, clock))  # noqa: TID251
    await clock.advance(60)
    assert not waiting.done()
    marker.write("")
    await clock.advance(5)
    assert waiting.done()


async def test_the_marker_of_the_toolkit_is_empty(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "toolkit-ready")
    await validate(toolkit_check(lambda *_: FINE, lambda _: True), marker, SimClock(), wait=False)
    assert marker.path.read_text() == ""


def test_a_failed_validation_prints_its_reason_and_exits_with_1(tmp_path: Path) -> None:
    roots = ("--system-root", str(tmp_path), "--driver-root", str(tmp_path), "--validations-dir", str(tmp_path / "run"))
    done = ran("validate", "driver", *roots)
    assert done.returncode == 1
    assert "no nvidia-smi on the host" in done.stderr
    assert ran("validate", "await", "../x").returncode == 2
    assert ran("validate", "plugin").returncode == 2


def test_the_validations_markers_are_removed_on_sigterm(tmp_path: Path) -> None:
    for name in ("driver-ready", "toolkit-ready", "plugin-ready", "vfio-pci-ready"):
        (tmp_path / name).touch()
    command = [*GPUVIRT, "validate", "rest", "--validations-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PATH": PATH}) as resting:
        assert resting.stderr is not None
        assert "ready for containers" in resting.stderr.readline()
        os.kill(resting.pid, signal.SIGTERM)
        assert resting.wait(60) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["vfio-pci-ready"], "files of other programs stay"
