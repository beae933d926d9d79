"""How the host's programs are run, and how their exit codes and outputs are handled."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.tools import PAUSES_S, Ended, HostTools, ToolError, ToolMissingError, run_program

GPU = PciAddress("0000:65:00.0")
HOST, DRIVER = Path("/host"), Path("/run/nvidia/driver")
LOCKED = Ended(1, "", "Cannot obtain unbindLock for 0000:65:00.0")
FINE = Ended(0, "it said this\n", "")


class Script:
    """Programs that end as the test sets, and repeat the last end."""

    def __init__(self, *ends: Ended | Exception) -> None:
        self.ends = list(ends)
        self.commands: list[tuple[str, ...]] = []
        self.timeouts: list[float | None] = []
        self.pauses: list[float] = []

    def run(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        self.commands.append(tuple(command))
        self.timeouts.append(timeout_s)
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, Exception):
            raise end
        return end

    def tools(self, *places: str, root: Path = HOST) -> HostTools:
        existing = {Path(place) for place in places}
        return HostTools(
            root, DRIVER, run=self.run, pause=self.pauses.append, has=existing.__contains__, is_confined=False
        )


def test_programs_of_the_driver_container_take_precedence_over_the_host() -> None:
    script = Script(FINE)
    both = ("/run/nvidia/driver/usr/bin/nvidia-smi", "/host/usr/bin/nvidia-smi")
    assert script.tools(*both).nvidia_smi("-q") == "it said this\n"
    script.tools(both[1]).nvidia_smi("-q")
    script.tools("/host/usr/local/bin/nvidia-smi").nvidia_smi("-q")
    script.tools("/usr/bin/nvidia-smi", root=Path("/")).nvidia_smi("-q")
    assert script.commands == [
        ("chroot", "/run/nvidia/driver", "/usr/bin/nvidia-smi", "-q"),
        ("chroot", "/host", "/usr/bin/nvidia-smi", "-q"),
        ("chroot", "/host", "/usr/local/bin/nvidia-smi", "-q"),
        ("/usr/bin/nvidia-smi", "-q"),
    ]


@pytest.mark.parametrize(("enable", "flag"), [(True, "-e"), (False, "-d")])
def test_sriov_manage_is_tried_again_while_a_process_has_the_gpu_open(enable: bool, flag: str) -> None:
    script = Script(LOCKED, Ended(1, "cannot obtain unbindlock", ""), FINE)
    script.tools("/host/usr/lib/nvidia/sriov-manage").sriov_manage(GPU, enable)
    assert script.commands == [("chroot", "/host", "/usr/lib/nvidia/sriov-manage", flag, GPU)] * 3
    assert script.pauses == list(PAUSES_S[:2])
    assert set(script.timeouts) == {None}, "an interrupted sriov-manage leaves a GPU without a driver"


def test_the_retries_of_sriov_manage_are_bounded() -> None:
    script = Script(LOCKED)
    with pytest.raises(ToolError, match=r"sriov-manage -e 0000:65:00.0 ended with 1: Cannot obtain unbindLock"):
        script.tools("/host/usr/lib/nvidia/sriov-manage").sriov_manage(GPU, enable=True)
    assert len(script.commands) == 1 + len(PAUSES_S)


def test_another_failure_of_sriov_manage_is_final() -> None:
    script = Script(Ended(1, "", "This is not a VGA or 3D controller. Exiting."))
    with pytest.raises(ToolError, match="not a VGA") as failed:
        script.tools("/host/usr/lib/nvidia/sriov-manage").sriov_manage(GPU, enable=True)
    assert (len(script.commands), script.pauses, failed.value.exit_code) == (1, [], 1)


def test_a_missing_program_is_reported_with_the_searched_roots() -> None:
    with pytest.raises(ToolMissingError, match="no nvidia-smi in /run/nvidia/driver or in /host"):
        Script(FINE).tools().nvidia_smi("-q")


@pytest.mark.parametrize("end", [Ended(127, "", "chroot: failed to run command"), FileNotFoundError(2, "gone")])
def test_a_program_removed_before_the_call_is_missing(end: Ended | Exception) -> None:
    with pytest.raises(ToolMissingError):
        Script(end).tools("/host/usr/bin/nvidia-smi").nvidia_smi("-q")


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (Ended(19, "Unable: In use by another client\n", ""), 19, "ended with 19: Unable: In use by another client"),
        (Ended(6, "", ""), 6, "ended with 6: no output"),
        (subprocess.TimeoutExpired("nvidia-smi", 120), None, "timed out"),
        (PermissionError(13, "Permission denied"), None, "Permission denied"),
    ],
)
def test_a_failure_of_nvidia_smi_has_its_exit_code_and_output(
    end: Ended | Exception, code: int | None, message: str
) -> None:
    with pytest.raises(ToolError, match=message) as failed:
        Script(end).tools("/host/usr/bin/nvidia-smi").nvidia_smi("vgpu", "-i", GPU, "-shm", "1")
    assert failed.value.exit_code == code
    assert not isinstance(failed.value, ToolMissingError)


def test_a_link_to_a_path_inside_the_root_is_a_program(tmp_path: Path) -> None:
    place = tmp_path / "usr/bin/nvidia-smi"
    place.parent.mkdir(parents=True)
    place.symlink_to("/etc/alternatives/nvidia-smi-of-that-root")
    script = Script(FINE)
    HostTools(tmp_path, run=script.run, is_confined=False).nvidia_smi("-L")
    assert script.commands == [("chroot", str(tmp_path), "/usr/bin/nvidia-smi", "-L")]


def test_a_real_program_is_run_without_the_settings_of_this_process(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$LC_ALL $HOME $1"\n')
    program.chmod(0o755)

    def run(command: Sequence[str], timeout_s: float | None) -> Ended:
        return run_program([str(program), *command[1:]], timeout_s)

    tools = HostTools(Path("/"), has=lambda place: place.name == "nvidia-smi", run=run)
    assert tools.nvidia_smi("-q") == "C  -q\n"


@pytest.mark.parametrize(
    ("is_confined", "expected"),
    [(False, ("chroot", "/host", "/usr/bin/nvidia-smi")), (True, ("/host/usr/bin/nvidia-smi",))],
)
def test_a_process_that_may_not_chroot_runs_programs_directly(is_confined: bool, expected: tuple[str, ...]) -> None:
    script = Script(FINE)
    existing = HOST / "usr/bin/nvidia-smi"
    HostTools(HOST, run=script.run, has=lambda place: place == existing, is_confined=is_confined).nvidia_smi("-L")
    assert script.commands == [(*expected, "-L")]
