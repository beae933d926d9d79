"""The check before a driver for containers binds a host's GPUs: none may be in use by a VM or unreadable."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.model.change.driverplanning import why_not_unused
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_host_in, driver_state
from tests.mount.mounting import GPUVIRT, mount, shell

UNUSED = f"{' '.join(GPUVIRT)} validate unused --host-root host"


@pytest.fixture
def codes(tmp_path: Path) -> Callable[[SimKernel], set[ReasonCode]]:
    def found(kernel: SimKernel) -> set[ReasonCode]:
        change_host = change_host_in(tmp_path, kernel, SimTools(kernel))
        kernel.writes.clear()
        reasons = why_not_unused(driver_state(change_host, NOBODY))
        assert kernel.writes == []
        return {reason.code for reason in reasons}

    return found


def test_gpus_on_a_vfio_driver_pass_while_unused(codes: Callable[[SimKernel], set[ReasonCode]]) -> None:
    kernel = build_host(load_host("2xA10"))
    assert codes(kernel) == set()
    kernel.start_vm(IommuGroup(12))
    assert codes(kernel) == {ReasonCode.IN_USE}


def test_gpus_with_vgpus_are_refused(codes: Callable[[SimKernel], set[ReasonCode]]) -> None:
    assert codes(build_host(load_host("4xT4"))) == {ReasonCode.CARRIES_VGPUS}


def test_gpus_count_as_used_while_processes_are_not_visible(codes: Callable[[SimKernel], set[ReasonCode]]) -> None:
    kernel = build_host(load_host("2xA10"))
    kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert codes(kernel) == {ReasonCode.PROCESSES_NOT_VISIBLE}


@pytest.mark.ring("mount")
def test_the_check_of_a_mounted_host_prints_its_reason(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10"):
        free = shell(UNUSED, tmp_path)
        assert (free.returncode, free.stdout) == (0, ""), free.stderr
    with mount(tmp_path / "host", "4xT4"):
        carries = shell(UNUSED, tmp_path)
        assert carries.returncode == 1
        assert "the driver for containers would take GPUs from VMs: CarriesVgpus: 0000:3b:00.0" in carries.stderr
    without_host = shell(UNUSED, tmp_path)
    assert without_host.returncode == 1
    assert "/sys/bus/pci/devices is not there, so the GPUs of this host are unknown" in without_host.stderr
