"""Every command judges a GPU alike: a reason of one command is a reason of all, with the same fix."""

from pathlib import Path

import pytest

from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.programs.tools import SimTools
from tests.cli.brokenhosts import BESIDE_NIC, CONSOLE, DISPLAY, FELL_OFF, GRACE, M60, NOUVEAU, OLD_DRIVER
from tests.cli.commandline import ran
from tests.diagnosis.doctor import sickhost

GPU = "0000:65:00.0"
UNFIT = {
    ReasonCode.GROUP_NOT_VIABLE: BESIDE_NIC,
    ReasonCode.FELL_OFF_BUS: FELL_OFF,
    ReasonCode.BOOT_CONSOLE: CONSOLE,
    ReasonCode.GRACE_DRIVER_MISSING: GRACE,
}


def exported(folder: Path, text: str) -> dict[str, str]:
    """Return the environment of commands on a host."""
    kernel = sickhost.simulated(f"about: a host\n{text}")
    if text is MIG:
        assert SimTools(kernel).run("nvidia-smi", ("-i", GPU, "-mig", "1")).exit_code == 0
    export(kernel, folder)
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


def test_a_gpu_that_no_vm_could_use_can_return_to_the_host(tmp_path: Path) -> None:
    done = ran("vfio", "unbind", GPU, "--dry-run", environment=exported(tmp_path / "host", CONSOLE))
    assert ReasonCode.BOOT_CONSOLE not in done.stdout
    assert done.returncode == 0


MIG = "slots: [{at: '0000:65:00.0', board: H100-SXM5-80GB, group: 46, vfs: 20}]"
CAN_MAKE = "slots: [{at: '0000:65:00.0', board: T4, group: 46}]"
HOSTS = [*UNFIT.items(), (ReasonCode.NO_VGPUS, MIG), (ReasonCode.NO_VGPUS, CAN_MAKE)]


def fixes(text: str, code: str) -> list[str]:
    """Return the first line of the fix of each reason with a code in a command's output."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if f"{code}: " in line]
    return [next(line.split("fix:")[1].strip() for line in lines[start:] if "fix:" in line) for start in starts]


@pytest.mark.parametrize(("code", "text"), HOSTS)
def test_a_code_has_one_fix_wherever_it_is_reported(tmp_path: Path, code: ReasonCode, text: str) -> None:
    environment = exported(tmp_path / "host", text)
    commands = (("devices",), ("doctor",), ("why", GPU), ("vfio", "status"))
    found = [fix for command in commands for fix in fixes(ran(*command, environment=environment).stdout, code)]
    found = [fix.partition(", then gpuvirt vfio unbind")[2] or fix for fix in found]  # doctor knows the host's modules
    assert len(found) >= 3
    assert len(set(found)) == 1


def test_no_command_advises_to_bind_the_hosts_own_function(tmp_path: Path) -> None:
    environment = exported(tmp_path / "host", BESIDE_NIC)
    (fix,) = fixes(ran("devices", environment=environment).stdout, "GroupNotViable")
    assert fix.startswith("move the GPU to another slot: 0000:66:00.0 is not part of its card")


def test_an_unbind_from_nouveau_is_not_advised(tmp_path: Path) -> None:
    environment = exported(tmp_path / "host", NOUVEAU)
    for command in (("devices",), ("why", GPU)):
        (fix, *_) = fixes(ran(*command, environment=environment).stdout, "NativeDriver")
        assert fix.startswith("blacklist nouveau, and reboot: gpuvirt doctor prints the commands; then gpuvirt vfio")
    doctor = ran("doctor", environment=environment)
    assert ("DriversFight" in doctor.stdout, doctor.returncode) == (True, 1)


def test_a_gpu_in_mig_mode_without_instances_is_not_taken_for_occupied(tmp_path: Path) -> None:
    environment = exported(tmp_path / "host", MIG)
    (fix,) = fixes(ran("doctor", environment=environment).stdout, "NoVgpus")
    assert f"gpuvirt vgpu create {GPU} TYPE" in fix
    assert "delete what occupies" not in fix


def test_a_card_in_display_mode_is_named_by_doctor_and_by_vgpu(tmp_path: Path) -> None:
    environment = exported(tmp_path / "host", DISPLAY)
    doctor = ran("doctor", environment=environment).stdout
    applied = ran("vgpu", "apply", "-c", "RTXA5000-6Q", "--dry-run", environment=environment).stdout
    assert fixes(doctor, "NoVgpuHost") == fixes(applied, "NoVgpuHost")
    assert "displaymodeselector" in fixes(doctor, "NoVgpuHost")[0]
    assert "install" not in applied


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("board: A5000,", "board: A5000, driver: vfio-pci,"), "it is bound to a VFIO driver"),
        (("class: '030000'", "class: '030200'"), "its driver nvidia creates no vGPUs on it"),
    ],
)
def test_only_a_display_on_its_native_driver_is_in_display_mode(
    tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    environment = exported(tmp_path / "host", DISPLAY.replace(*change))
    applied = ran("vgpu", "apply", "-c", "RTXA5000-6Q", "--dry-run", environment=environment).stdout
    assert f"NoVgpuHost: {GPU} can't carry vGPUs: {why}" in applied


def test_a_gpu_without_a_driver_is_said_to_lack_the_vgpu_manager(tmp_path: Path) -> None:
    environment = exported(tmp_path / "host", M60)
    why, doctor = ran("why", GPU, environment=environment).stdout, ran("doctor", environment=environment).stdout
    for text in (why, doctor):
        assert "install NVIDIA's vGPU manager" in fixes(text, "NoDriver")[0]
    assert "shared with 0000:64:00.0; no host driver prevents opening it" in why, "a bridge keeps its driver"


@pytest.mark.parametrize(
    ("resource", "code"),
    [
        ("nvidia.com/NVIDIA_A10-24Q", ReasonCode.NO_SUCH_TYPE),
        ("NVIDIA_A10-8Q", ReasonCode.NO_SUCH_TYPE),
        ("nvidia.com/NVIDIA_A10-12Q", FindingCode.NO_SUCH_RESOURCE),
        ("nvidia.com/GRID_T4-16Q", FindingCode.NO_SUCH_RESOURCE),
        ("nvidia.com/NVIDIA_A10-5Q", FindingCode.NO_SUCH_RESOURCE),
    ],
)
def test_a_type_that_the_driver_lacks_is_told_from_an_unknown_resource(
    tmp_path: Path, resource: str, code: ReasonCode | FindingCode
) -> None:
    shown = ran("why", resource, environment=exported(tmp_path / "host", OLD_DRIVER)).stdout
    assert f"{code}: " in shown
    assert "did you mean" not in shown, "no guess between sizes of types"
