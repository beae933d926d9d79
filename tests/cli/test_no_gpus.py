"""Commands for all GPUs on a host without GPUs, and on one whose devices can't be listed."""

from pathlib import Path

import pytest

from tests.cli.commandline import called


@pytest.mark.parametrize(
    "command", [("bind", "--all"), ("bind", "--all", "--dry-run"), ("unbind", "--all"), ("status",)]
)
def test_a_host_without_gpus_is_said_to_have_none(tmp_path: Path, command: tuple[str, ...]) -> None:
    for folder in ("sys/bus/pci/devices", "proc", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    done = called("vfio", *command, "--host-root", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, b"No GPU of NVIDIA, AMD or Intel on this host.\n")


@pytest.mark.parametrize(
    "command",
    [("devices",), ("vfio", "status"), ("vfio", "bind", "--all", "--dry-run"), ("vgpu", "list"), ("vgpu", "types")],
)
def test_a_host_whose_devices_are_not_listed_is_not_said_to_have_none(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = called(*command, "--host-root", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == (
        b"gpuvirt: /sys/bus/pci/devices is not there, so the GPUs of this host are unknown; check --host-root, below"
        b" which the host's /sys must be\n"
    )
