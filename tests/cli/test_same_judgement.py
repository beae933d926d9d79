"""Every command judges a GPU alike: a reason of one command is a reason of all, with the same fix."""

from pathlib import Path

import pytest

from gpuvirt import documents
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec
from tests.cli.commandline import ran

GPU = "0000:65:00.0"
FELL_OFF = "slots: [{at: '0000:65:00.0', board: MI300X, driver: vfio-pci, group: 41, fell_off_bus: true}]"
CONSOLE = """
boards:
  P5000: {functions: [{id: '10de:1bb0', class: '030000', native_driver: nouveau}]}
slots: [{at: '0000:65:00.0', board: P5000, driver: vfio-pci, group: 90}]
platform: {release: 5.14.21-150500.55.59-default, console: '0000:65:00.0'}
"""
GRACE = "slots: [{at: '0000:65:00.0', board: GH200, driver: vfio-pci, group: 9}]"
UNFIT = {
    ReasonCode.FELL_OFF_BUS: FELL_OFF,
    ReasonCode.BOOT_CONSOLE: CONSOLE,
    ReasonCode.GRACE_DRIVER_MISSING: GRACE,
}


def exported(folder: Path, text: str) -> dict[str, str]:
    """Return the environment of commands on a host."""
    export(build_host(documents.parse(f"about: a host\n{text}", HostSpec, where="test")), folder)
    return {"GPUVIRT_HOST_ROOT": str(folder), "COLUMNS": "500"}


@pytest.mark.parametrize("code", UNFIT)
@pytest.mark.parametrize(
    ("command", "fails"),
    [
        (("devices",), False),
        (("doctor",), None),
        (("why", GPU), True),
        (("vfio", "status"), False),
        (("vfio", "bind", "--all", "--dry-run"), True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_gpu_that_no_vm_could_use_is_reported_by_every_command(
    tmp_path: Path, code: ReasonCode, command: tuple[str, ...], fails: bool | None
) -> None:
    done = ran(*command, environment=exported(tmp_path / "host", UNFIT[code]))
    assert f"{code}: {GPU} " in done.stdout
    assert "yes\n" not in done.stdout
    assert "already" not in done.stdout
    if fails is not None:
        assert bool(done.returncode) is fails
