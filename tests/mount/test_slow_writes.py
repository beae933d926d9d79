"""Operations of a mounted host that take time or block, and the record of its writes and calls."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuvirt_sim.mounted.record import Begun, Over, parse_line
from tests.mount.mounting import GPUVIRT, mount, shell, until

pytestmark = pytest.mark.ring("mount")

T4 = "0000:3b:00.0"
RTX = "0000:04:00.0"


def lines(record: Path) -> list[Begun | Over]:
    return [parse_line(line) for line in record.read_bytes().splitlines()]


@contextmanager
def started(command: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(["/bin/sh", "-c", command], cwd=cwd, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_slow_removal_delays_no_other_process(tmp_path: Path) -> None:
    record, live = tmp_path / "record", tmp_path / "host/sys/bus/mdev/devices"
    with mount(tmp_path / "host", "4xT4", "--slow", "remove=3600s", "--record", str(record)) as server:
        parent = (tmp_path / f"host/sys/class/mdev_bus/{T4}").resolve()
        left = parent / "mdev_supported_types/nvidia-234/available_instances"
        before = left.read_text()
        uuid = next(mdev.name for mdev in live.iterdir() if (parent / mdev.name).exists())
        with started(f"echo 1 > {uuid}/remove", live) as writer:
            until(lambda: uuid not in os.listdir(live))  # noqa: PTH208
            assert left.read_text() == before, "its capacity is taken until the removal ends"
            other = next(live.iterdir())
            assert (other / "mdev_type/name").read_text()
            assert writer.poll() is None
            server.terminate()  # the write ends with the host
        begun = lines(record)
    assert [(line.path.rpartition("/")[2], line.data) for line in begun if isinstance(line, Begun)] == [
        ("remove", "1\n")
    ]


def test_a_slow_removal_ends(tmp_path: Path) -> None:
    record, live = tmp_path / "record", tmp_path / "host/sys/bus/mdev/devices"
    with mount(tmp_path / "host", "4xT4", "--slow", "remove=300ms", "--record", str(record)):
        uuid = next(live.iterdir()).name
        began_s = time.monotonic()  # noqa: TID251  another process's time
        assert shell(f"echo 1 > {uuid}/remove", live).returncode == 0
        assert time.monotonic() - began_s >= 0.3  # noqa: TID251
        assert shell(f"echo no > {T4}/create", live).returncode != 0
        assert shell(f"echo {uuid} > {tmp_path}/host/sys/bus/pci/drivers/nvidia/unbind", live).returncode != 0
        assert shell(f"{tmp_path}/host/usr/bin/nvidia-smi -L", tmp_path).returncode == 0
    removed, over, failed, refused, called, _ = lines(record)
    assert isinstance(removed, Begun)
    assert isinstance(over, Over)
    assert (removed.call, removed.path.endswith(f"{uuid}/remove"), over.errno) == (over.call, True, None)
    assert (over.time - removed.time).total_seconds() >= 0.3
    assert isinstance(failed, Begun)
    assert isinstance(refused, Over)
    assert refused.errno == "ENODEV"
    assert isinstance(called, Begun)
    assert (called.path, called.data) == ("nvidia-smi", "-L")


def test_a_process_that_uses_a_group_blocks_unbind_and_gets_a_request(tmp_path: Path) -> None:
    """The file of a group takes `use` in place of a VM's ioctls."""
    with mount(tmp_path / "host", "4xRTX2060", "--nodes", "files"):
        gpu = tmp_path / f"host/sys/bus/pci/devices/{RTX}"
        assert shell(f"{' '.join(GPUVIRT)} vfio bind {RTX} --host-root host --assume-unallocated", tmp_path).stdout
        node = tmp_path / "host/dev/vfio" / (gpu / "iommu_group").readlink().name
        user = os.open(node, os.O_RDWR)
        assert os.write(user, b"use\n") == 4
        assert os.read(user, 100) == b""
        with started(f"echo {RTX} > host/sys/bus/pci/drivers/vfio-pci/unbind", tmp_path) as writer:
            until(lambda: os.read(user, 100) == f"{RTX}\n".encode())
            assert not (gpu / "driver").is_symlink()
            assert (gpu / "vendor").read_text() == "0x10de\n"
            assert writer.poll() is None
            with pytest.raises(OSError, match="Invalid argument"):
                os.write(user, b"misuse")
            os.close(user)
            assert writer.wait(100) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--slow sleep=1s", "--slow: 'sleep=1s' names no operation; expected remove, create,"),
        ("--slow remove", "--slow: 'remove' names no operation; expected remove, create,"),
        ("--slow remove=3", "--slow: 'remove=3' has no duration; expected a number with ms or s: 300ms, 1.5s"),
        ("--slow remove=9000s", "--slow: 'remove=9000s' takes too long; expected an hour at most: 3600s"),
        ("--record none/record", "--record: none/record can't be written: No such file or directory"),
    ],
)
def test_invalid_options(tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "host").mkdir()
    done = shell(f"{' '.join(GPUVIRT)} sim mount host {options}", tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
