"""The programs of a mounted host, run by users and by gpuvirt: they act on it, and answer as in memory."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import host_names, load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.mount.mounting import GPUVIRT, mount, shell

pytestmark = pytest.mark.ring("mount")

PLACES = {"nvidia-smi": "usr/bin", "sriov-manage": "usr/lib/nvidia", "modprobe": "usr/sbin"}
DRIVER = "run/nvidia/driver"
VGPU = f"{' '.join(GPUVIRT)} vgpu"
WALK = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q"),
    ("sriov-manage", "-e", "ALL"),
    ("nvidia-smi", "vgpu", "-s", "-v"),
    ("nvidia-smi", "-i", "1", "-mig", "1"),
    ("nvidia-smi", "mig", "-lgip"),
    ("nvidia-smi", "mig", "-i", "1", "-cgi", "14,14", "-C"),
    ("nvidia-smi", "mig", "-lgi"),
    ("nvidia-smi", "vgpu", "-i", "1", "-shm", "1"),
    ("nvidia-smi", "vgpu", "set-scheduler-state", "--policy", "3"),
    ("nvidia-smi", "vgpu", "-ss"),
    ("nvidia-smi", "--no-such-option"),
    ("nvidia-smi", "-i", "0000:ff:00.0"),
    ("sriov-manage", "-d", "ALL"),
    ("sriov-manage", "-e", "here"),
    ("modprobe", "--", "no-such-module"),
)


def called(root: Path, program: str, *arguments: str) -> tuple[int, str, str]:
    place = root / PLACES[program] / program
    done = subprocess.run([str(place), *arguments], capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout, done.stderr


def in_memory(kernel: SimKernel, program: str, *arguments: str) -> tuple[int, str, str]:
    ended = SimTools(kernel).run(program, arguments)
    return ended.exit_code, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", [name for name in host_names() if name not in {"8xMI300X", "2xFlex170", "2xW7900"}])
def test_programs_answer_as_they_do_in_memory(tmp_path: Path, name: str) -> None:
    kernel = build_host(load_host(name))
    with mount(tmp_path / "host", name):
        for command in WALK:
            assert called(tmp_path / "host", *command) == in_memory(kernel, *command), command


def test_a_host_without_nvidia_has_none_of_its_programs(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "8xMI300X"):
        assert not (tmp_path / "host/usr/bin/nvidia-smi").exists()
        assert called(tmp_path / "host", "modprobe", "vfio-pci") == (0, "", "")


def test_their_effect_is_visible_in_the_mount(tmp_path: Path) -> None:
    folder = tmp_path / "host/sys/bus/pci/devices/0000:b1:00.0"
    with mount(tmp_path / "host", "2xA10-vgpu"):
        assert not (folder / "virtfn0").exists()
        assert called(tmp_path / "host", "sriov-manage", "-e", "0000:b1:00.0")[0] == 0
        assert (folder / "virtfn31").exists()
        assert called(tmp_path / "host", "sriov-manage", "-d", "0000:b1:00.0")[0] == 0
        assert not (folder / "virtfn0").exists()


@pytest.mark.parametrize("where", ["host", "container"])
def test_gpuvirt_finds_them_by_the_host_root(tmp_path: Path, where: str) -> None:
    with mount(tmp_path / "host", "2xA30", "--vgpu-manager", where):
        done = shell(f"{VGPU} apply -c A30-2-12C --host-root host", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "create a GPU instance 2g.12gb" in done.stdout
        made = json.loads(shell(f"{VGPU} list --host-root host -o json", tmp_path).stdout)
        assert [vgpu["type"] for vgpu in made] == ["NVIDIA A30-2-12C"] * 4
        set_ = shell(f"{VGPU} scheduler get --host-root host", tmp_path)
        assert set_.stdout.count("best-effort") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
@pytest.mark.parametrize(("where", "root"), [("host", ""), ("container", DRIVER)])
def test_they_work_after_chroot(tmp_path: Path, where: str, root: str) -> None:
    with mount(tmp_path / "host", "2xA10-sriov", "--vgpu-manager", where):
        done = shell(f"chroot {tmp_path}/host/{root} /usr/bin/nvidia-smi -L", tmp_path)
        assert done.stdout.startswith("GPU 0: NVIDIA A10 (UUID: GPU-"), done.stderr


def test_a_host_without_the_vgpu_manager(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10-sriov", "--vgpu-manager", "none"):
        done = shell(f"{VGPU} scheduler get --host-root host", tmp_path)
        assert "install NVIDIA's vGPU manager" in done.stdout


def on(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*GPUVIRT, "sim", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize(
    ("simulated", "script", "expected"),
    [
        ("2xA30", "nvidia-smi -i 1 -mig 1 && nvidia-smi -q -i 1 | grep -A1 'MIG Mode'", "Current"),
        ("2xA10-vgpu", "sriov-manage -e ALL && nvidia-smi vgpu -i 1 -shm 1", "Enabled vGPU heterogeneous mode"),
        ("4xT4", "nvidia-smi vgpu set-scheduler-state -i 2 -p 2 && nvidia-smi vgpu -ss -i 2", "Equal Share"),
        ("2xA10", 'echo 0000:65:00.0 > "$GPUVIRT_HOST_ROOT/sys/bus/pci/drivers/vfio-pci/unbind"; echo $?', "0"),
    ],
)
def test_a_host_of_sim_run_acts(simulated: str, script: str, expected: str) -> None:
    done = on("-H", simulated, "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


@pytest.mark.parametrize("options", [["-H", "4xT4"], ["-H", "4xT4", "--snapshot"]])
def test_sim_run_that_is_terminated_ends_its_program_and_leaves_nothing(options: list[str]) -> None:
    command = [*GPUVIRT, "sim", "run", *options, "--", "sh", "-c", 'echo "$GPUVIRT_HOST_ROOT"; exec sleep 100']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        root = Path(server.stdout.readline().strip())
        server.terminate()
        assert server.wait(100) == 128 + signal.SIGTERM
        assert server.stdout.read() == ""
    assert not root.parent.exists()
    assert f" {root} " not in Path("/proc/mounts").read_text()


def test_a_program_of_a_simulator_that_has_ended_fails_with_a_message(tmp_path: Path) -> None:
    copy = tmp_path / "copy/usr/bin/nvidia-smi"
    copy.parent.mkdir(parents=True)
    with mount(tmp_path / "host", "4xT4"):
        copy.write_bytes((tmp_path / "host/usr/bin/nvidia-smi").read_bytes())
    copy.chmod(0o755)
    code, _, message = called(tmp_path / "copy", "nvidia-smi")
    assert code == 1
    assert "the simulator that served this host has ended" in message


def test_doctor_reads_all_files_of_the_host() -> None:
    """It reads the kernel's files, and also those that identify the boot loader in /etc."""

    def codes(*options: str) -> Mapping[str, object]:
        done = on(*options, "-H", "2xA10-no-iommu", "--", *GPUVIRT, "doctor", "-o", "json")
        results = json.loads(done.stdout)["results"]
        return {result["check"]: [finding.get("fix") for finding in result["findings"]] for result in results}

    assert codes() == codes("--snapshot")


@pytest.mark.parametrize("options", [["-H", "2xA10"], ["-H", "2xA10", "--snapshot"]])
def test_lspci_lists_the_gpus_of_the_simulated_host(options: list[str]) -> None:
    done = on(*options, "--", "lspci", "-nnk", "-d", "10de:")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "[10de:2236]" in line] == ["65:00.0", "ca:00.0"]
    assert done.stdout.count("Kernel driver in use: vfio-pci") == 2


def test_a_simulated_host_without_a_kubelet_has_no_allocations() -> None:
    done = on("-H", "2xA10-sriov", "--", "gpuvirt", "vgpu", "apply", "-c", "A10-4Q")
    assert (done.returncode, done.stdout.count("carries 6 A10-4Q")) == (0, 2), done.stdout + done.stderr
