"""The checks of a node for containers: what they ask, what they write, and what they say where they don't hold."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.hardware.containerdriver import DriverRoots, FoundDriver, NotReadyError, check_toolkit, find_driver
from gpuvirt.hardware.tools import Ended
from gpuvirt.paths import HostPath
from gpuvirt.sim.clock import SimClock
from gpuvirt.validator import Marker, await_marker, driver_check, toolkit_check, validate
from tests.commandline import GPUVIRT, PATH, ran

FINE, BROKEN = Ended(0, "GPU 0: NVIDIA A10\n", ""), Ended(9, "", "couldn't communicate with the NVIDIA driver")
ON_HOST = HostPath("/opt/driver")


class Node:
    """A host and a driver's container, with an nvidia-smi that ends as it is told to."""

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


def test_a_driver_of_the_hosts_own_goes_first(node: Node) -> None:
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
def test_a_driver_in_a_container_is_reported_as_the_host_has_it(node: Node, own: bool, lines: tuple[str, str]) -> None:
    node.install(node.roots.driver)
    node.start()
    if own:
        (node.roots.driver / "dev").mkdir()
    told = dict(line.split("=") for line in node.find().lines.splitlines())
    assert (told["IS_HOST_DRIVER"], told["NVIDIA_DRIVER_ROOT"]) == ("false", "/opt/driver")
    assert told["DRIVER_ROOT_CTR_PATH"] == "/driver-root"
    assert (told["NVIDIA_DEV_ROOT"], told["DEV_ROOT_CTR_PATH"]) == lines


def test_a_container_that_is_not_up_has_no_driver_yet(node: Node) -> None:
    node.install(node.roots.driver)
    with pytest.raises(NotReadyError, match="driver container is not ready yet"):
        node.find()
    assert node.asked == []


def test_a_driver_that_does_not_work_is_none(node: Node) -> None:
    node.ends = BROKEN
    node.install(node.roots.system)
    with pytest.raises(NotReadyError, match=r"driver that is installed on the host.*couldn't communicate"):
        node.find()


def test_without_any_driver_both_places_are_named(node: Node) -> None:
    node.start()
    with pytest.raises(NotReadyError, match="no nvidia-smi on the host or in /opt/driver"):
        node.find()


def test_a_toolkit_is_there_when_it_has_put_a_driver_into_this_container(node: Node) -> None:
    def run(command: Sequence[str], timeout_s: float | None) -> Ended:  # noqa: ARG001
        assert command[0] != "chroot"
        return node.ends

    with pytest.raises(NotReadyError, match="its runtime has given it no GPU"):
        check_toolkit(run, lambda _: False)
    check_toolkit(run, lambda _: True)
    node.ends = BROKEN
    with pytest.raises(NotReadyError, match="do not work"):
        check_toolkit(run, lambda _: True)


async def test_a_check_is_made_until_it_holds_and_its_file_is_there_only_then(node: Node, tmp_path: Path) -> None:
    marker, clock = Marker(tmp_path / "run/driver-ready"), SimClock()
    marker.write("of an hour ago")
    checking = asyncio.ensure_future(  # noqa: TID251
        validate(driver_check(node.roots, node.run), marker, clock, wait=True)
    )
    await clock.advance(20)
    assert not marker.is_there
    node.install(node.roots.driver)
    node.start()
    await clock.advance(5)
    await checking
    assert "NVIDIA_DRIVER_ROOT=/opt/driver" in marker.path.read_text()


async def test_without_waiting_the_first_failure_is_the_last(node: Node, tmp_path: Path) -> None:
    marker = Marker(tmp_path / "driver-ready")
    with pytest.raises(NotReadyError):
        await validate(driver_check(node.roots, node.run), marker, SimClock(), wait=False)
    assert not marker.is_there


async def test_who_waits_for_a_file_goes_on_when_it_is_there(tmp_path: Path) -> None:
    marker, clock = Marker(tmp_path / "toolkit-ready"), SimClock()
    waiting = asyncio.ensure_future(await_marker(marker, clock))  # noqa: TID251
    await clock.advance(60)
    assert not waiting.done()
    marker.write("")
    await clock.advance(5)
    assert waiting.done()


async def test_toolkit_ready_says_nothing(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "toolkit-ready")
    await validate(toolkit_check(lambda *_: FINE, lambda _: True), marker, SimClock(), wait=False)
    assert marker.path.read_text() == ""


def test_the_command_says_what_is_wrong_and_ends_with_1(tmp_path: Path) -> None:
    roots = ("--system-root", str(tmp_path), "--driver-root", str(tmp_path), "--validations-dir", str(tmp_path / "run"))
    done = ran("validate", "driver", *roots)
    assert done.returncode == 1
    assert "no nvidia-smi on the host" in done.stderr
    assert ran("validate", "await", "../x").returncode == 2
    assert ran("validate", "plugin").returncode == 2


def test_files_go_with_the_agent(tmp_path: Path) -> None:
    for name in ("driver-ready", "toolkit-ready", "plugin-ready", "vfio-pci-ready"):
        (tmp_path / name).touch()
    command = [*GPUVIRT, "validate", "rest", "--validations-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PATH": PATH}) as resting:
        assert resting.stderr is not None
        assert "ready for containers" in resting.stderr.readline()
        os.kill(resting.pid, signal.SIGTERM)
        assert resting.wait(60) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["vfio-pci-ready"], "what is others' stays"
