"""`gpuvirt vfio`: which devices its arguments choose, and what `--force` asks."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import ran
from tests.diagnosis.doctor.sickhost import host

GPU, AUDIO, SECOND, SECOND_AUDIO = "0000:04:00.0", "0000:04:00.1", "0000:3b:00.0", "0000:3b:00.1"
A10, T4, SWITCH = "0000:65:00.0", "0000:86:00.0", "0000:05:00.0"
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in range(5, 9))
H100S = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
ONE_OF_GROUP = "0000:0b:01.0"


class Terminal(io.StringIO):
    """A terminal at which a user has typed an answer."""

    @override
    def isatty(self) -> bool:
        return True


def vfio(folder: Path, simulated: str, *arguments: str) -> "CompletedProcess[str]":
    export(build_host(load_host(simulated)), folder)
    return ran("vfio", *arguments, "--host-root", str(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bind"], "give either addresses or --all"),
        (["bind", GPU, "--all"], "give either addresses or --all"),
        (["bind", "4:00.0"], "is not a PCI address"),
        (["bind", "0000:99:00.0"], "this host has no such function"),
        (["bind", AUDIO], f"it is bound together with its GPU, {GPU}"),
        (["bind", SECOND_AUDIO], f"it is bound together with its GPU, {SECOND}"),
        (["bind", GPU, "--also", "x"], "is not a PCI address"),
        (["bind", GPU, "--force"], "standard input is not a terminal"),
    ],
)
def test_invalid_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = vfio(tmp_path, "4xRTX2060", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("simulated", "arguments", "chosen"),
    [
        ("8xH100", [SWITCH], [SWITCH]),
        ("8xH100", ["--all"], H100S),
        ("8xH100", ["--all", "--nvswitches"], [*SWITCHES, *H100S]),
        ("2xRTX4090-one-group", [ONE_OF_GROUP], [ONE_OF_GROUP]),
    ],
)
def test_only_the_chosen_devices_are_planned(
    tmp_path: Path, simulated: str, arguments: Sequence[str], chosen: Sequence[str]
) -> None:
    done = vfio(tmp_path, simulated, "unbind", *arguments, "--dry-run", "-o", "json")
    assert [result["gpus"] for result in json.loads(done.stdout)] == [[address] for address in chosen]


def test_gpus_of_one_group_return_together(tmp_path: Path) -> None:
    other, both = ONE_OF_GROUP.replace("01.0", "02.0"), f"{ONE_OF_GROUP} {ONE_OF_GROUP.replace('01.0', '02.0')}"
    done = vfio(tmp_path, "2xRTX4090-one-group", "unbind", ONE_OF_GROUP, "--dry-run")
    assert (done.returncode, done.stdout.count("GroupNotViable: ")) == (1, 1), "the audio function has the same reason"
    assert f"GroupNotViable: {other} can't serve VMs once {ONE_OF_GROUP} (gpu, vfio-pci)" in done.stdout
    assert f"fix:  return the GPUs of the group together: gpuvirt vfio unbind {both}; an agent" in done.stdout
    assert ran("vfio", "unbind", *both.split(), "--dry-run", "--host-root", str(tmp_path)).returncode == 0


def test_a_gpu_that_is_left_without_a_driver_is_not_reported_as_bound(tmp_path: Path) -> None:
    done = vfio(tmp_path, "8xH100", "unbind", H100S[0], "--dry-run")
    assert (done.returncode, f"{H100S[0]}: unbind from vfio-pci" in done.stdout) == (1, True)
    assert "is left without a driver" in done.stdout
    assert f"fix:  when all GPUs are free: echo {H100S[0]} > /sys/bus/pci/drivers_probe" in done.stdout
    assert "bound for the host" not in done.stdout
    rebound = ran("vgpu", "apply", "-c", "H100XM-80C", "--rebind", "--dry-run", "--host-root", str(tmp_path))
    assert (rebound.returncode, f"{H100S[0]} is left without a driver" in rebound.stdout) == (1, True)


def test_a_gpu_without_a_driver_beside_nvswitches_names_the_probe(tmp_path: Path) -> None:
    """`vfio unbind` and `vgpu apply --rebind` refuse this GPU."""
    kernel = build_host(load_host("8xH100"))
    kernel.rebind(PciAddress(H100S[0]), None)
    export(kernel, tmp_path)
    probe = f"when all GPUs are free: echo {H100S[0]} > /sys/bus/pci/drivers_probe"
    for arguments in (("devices",), ("vgpu", "create", H100S[0], "H100XM-80C", "--dry-run")):
        done = ran(*arguments, "--host-root", str(tmp_path))
        assert probe in " ".join(done.stdout.split()), done.stdout


WITHOUT = PlatformSpec(modules=("nvidia",))


@pytest.mark.parametrize(
    ("platform", "code", "fix"),
    [
        (replace(WITHOUT, available=()), "VfioMissing", "install the kernel's extra modules"),
        (replace(WITHOUT, files={"/etc/modprobe.d/no.conf": "install vfio-pci /bin/false"}), "VfioBlocked", "no.conf"),
        (replace(WITHOUT, cmdline="module_blacklist=vfio"), "VfioBlocked", "remove module_blacklist=vfio from"),
        (replace(WITHOUT, files={"/etc/modprobe.d/no.conf": "install vfio_iommu_type1 /bin/false"}), None, ""),
        (replace(WITHOUT, missing=(f"/lib/modules/{WITHOUT.release}/modules.dep",)), None, ""),
        (replace(WITHOUT, modules=("nvidia", "vfio_pci"), available=()), None, ""),
    ],
    ids=["missing", "blocked by modprobe", "blocked by the kernel", "another module", "unknown", "loaded"],
)
def test_a_vfio_pci_that_cannot_be_loaded_is_said_before_the_change(
    tmp_path: Path, platform: PlatformSpec, code: str | None, fix: str
) -> None:
    export(host(platform, driver="native"), tmp_path)
    bind = ran("vfio", "bind", A10, "--dry-run", "--host-root", str(tmp_path))
    status = ran("vfio", "status", "--host-root", str(tmp_path)).stdout
    assert (bind.returncode, "would be bound" in bind.stdout) == ((1, False) if code else (0, True))
    assert ("possible: gpuvirt vfio bind" in status) is (code is None)
    for shown in (bind.stdout, status):
        assert f"{code}: " in shown or code is None
        assert fix in shown


@pytest.mark.parametrize("driver", ["nvidia", "none", "vfio-pci"])
def test_a_gpu_whose_memory_has_no_address_is_no_gpu_for_vms_with_any_driver(tmp_path: Path, driver: str) -> None:
    export(host(PlatformSpec(bars_unassigned=(A10,)), driver=driver), tmp_path)
    rows = json.loads(ran("vfio", "status", "--host-root", str(tmp_path), "-o", "json").stdout)
    assert [[reason["code"] for reason in row["reasons"]] for row in rows] == [["BarUnassigned"], []]
    doctor = ran("doctor", "--host-root", str(tmp_path)).stdout
    assert ("enable Above 4G Decoding" in doctor, "gpuvirt doctor on the node" in doctor) == (True, False)


def test_a_gpu_on_a_driver_that_only_reserves_it_serves_nobody(tmp_path: Path) -> None:
    export(host(driver="pci-stub"), tmp_path)
    for command in ("devices", "doctor"):
        text = " ".join(ran(command, "--host-root", str(tmp_path)).stdout.split())
        assert f"NoDriver: {A10} is bound to pci-stub, which only reserves it: neither the host nor a VM can" in text
        assert f"gpuvirt vfio bind {A10}, or mode: passthrough" in text
    (row, *_) = json.loads(ran("devices", "--host-root", str(tmp_path), "-o", "json").stdout)["gpus"]
    assert (row["address"], row["mode"]) == (A10, "unbound")


def test_an_unbind_of_nouveau_is_warned_of_as_devices_does(tmp_path: Path) -> None:
    export(host(driver="nouveau"), tmp_path)
    where = ("--host-root", str(tmp_path))
    warning = f"NativeDriver: {A10} is bound to nouveau, whose unbind can hang where the GPU shows a console"
    assert warning in " ".join(ran("devices", *where).stdout.split())
    assert warning in " ".join((status := ran("vfio", "status", *where).stdout).split())
    assert f"{A10}  nouveau" in status
    assert "possible: gpuvirt vfio bind" not in next(line for line in status.splitlines() if "nouveau" in line)
    bind = ran("vfio", "bind", A10, "--dry-run", *where)
    assert (bind.returncode, f"gpuvirt: {warning}" in bind.stderr) == (0, True), bind.stderr
    assert "blacklist nouveau, and reboot" in bind.stderr


def test_force_asks_about_the_devices_that_it_unbinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    done = vfio(tmp_path, "4xT4", "bind", T4, "--force")
    assert done.returncode == 1
    assert done.stdout.startswith(f"Unbind {T4} from the host's drivers")
    assert (tmp_path / f"sys/bus/pci/devices/{T4}/driver_override").read_text() == "(null)\n"


def test_a_dry_run_with_force_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = vfio(tmp_path, "4xT4", "bind", T4, "--force", "--dry-run")
    assert (done.returncode, f"{T4}: would be bound for VMs" in done.stdout) == (0, True)


def test_a_vf_of_nvidia_is_refused_as_one_that_carries_a_vgpu(tmp_path: Path) -> None:
    done = vfio(tmp_path, "4xL40S", "bind", "0000:25:00.4")
    assert done.returncode == 2
    message = " ".join(done.stderr.replace("│", " ").split())
    assert "it is a VF of 0000:25:00.0, which stays on its driver and carries a vGPU" in message
    assert "gpuvirt vgpu create 0000:25:00.0 TYPE" in message


def test_vfs_that_are_parts_of_a_gpu_are_listed_with_the_gpus(tmp_path: Path) -> None:
    rows = json.loads(vfio(tmp_path, "2xFlex170", "status", "-o", "json").stdout)
    vfs = [f"0000:4d:00.{number}" for number in range(4, 8)]
    assert [row["address"] for row in rows] == ["0000:4d:00.0", *vfs, "0000:b3:00.0"]
    assert [bool(row["steps"]) for row in rows] == [False, *[True] * 4, True], "the GPU with VFs keeps its driver"
