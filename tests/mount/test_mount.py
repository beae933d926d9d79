"""A mounted host, used by other programs, and by the agent in another process."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.scan import scan
from gpuvirt.paths import HostRoots
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import host_names, load_host
from tests.mount.mounting import GPUVIRT, detach_dead_mounts, mount, shell, until

pytestmark = pytest.mark.ring("mount")

LSPCI = shutil.which("lspci", path=f"{os.defpath}:/usr/sbin:/sbin")


@pytest.mark.parametrize("name", host_names())
def test_a_mounted_host_shows_the_same_as_in_memory(tmp_path: Path, name: str) -> None:
    with mount(tmp_path / "host", name):
        assert scan(RealKernel(HostRoots.under(tmp_path / "host"))) == scan(build_host(load_host(name)))


def test_a_mount_whose_server_was_killed_does_not_outlive_the_next_test_run(tmp_path: Path) -> None:
    with mount(tmp_path / "dead", "2xA10") as server, mount(tmp_path / "alive", "2xA10"):
        watcher = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text())
        os.kill(watcher, signal.SIGSTOP)  # it would unmount the folder of the killed server
        try:
            assert (tmp_path / "dead").is_dir()  # as another test may have just asked: the kernel keeps the answer
            server.kill()
            server.wait()
            assert tmp_path / "dead" in (detached := detach_dead_mounts())
            assert tmp_path / "alive" not in detached
            assert list((tmp_path / "dead").iterdir()) == []
            assert (tmp_path / "alive/sys").is_dir()
        finally:
            os.kill(watcher, signal.SIGCONT)


@pytest.mark.skipif(LSPCI is None, reason="no lspci (Debian: apt-get install pciutils)")
def test_lspci_prints_the_lines_that_users_know(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10"):
        found = shell(f"{LSPCI} -A linux-sysfs -O sysfs.path=host/sys/bus/pci -nnk -d 10de:", tmp_path).stdout
    lines = found.splitlines()
    name = "3D controller [0302]: NVIDIA Corporation GA102GL [A10] [10de:2236] (rev a1)"
    assert [line for line in lines if not line.startswith("\t")] == [f"65:00.0 {name}", f"ca:00.0 {name}"]
    assert lines.count("\tKernel driver in use: vfio-pci") == 2
    assert sum("Subsystem: NVIDIA Corporation" in line and "[10de:1482]" in line for line in lines) == 2


def test_a_gpu_is_bound_to_another_driver_with_echo(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10"):
        pci = tmp_path / "host/sys/bus/pci"
        assert shell("/bin/echo 0000:65:00.0 > drivers/vfio-pci/unbind", pci).returncode == 0
        assert shell("ls ../../../dev/vfio", pci).stdout.split() == ["22", "vfio"]
        assert "No such device" in shell("/bin/echo 0000:65:00.0 > drivers/vfio-pci/unbind", pci).stderr
        assert shell("/bin/echo nvidia > devices/0000:65:00.0/driver_override", pci).returncode == 0
        assert shell("/bin/echo 0000:65:00.0 > drivers_probe", pci).returncode == 0
        assert shell("basename $(readlink devices/0000:65:00.0/driver)", pci).stdout == "nvidia\n"


def test_vgpus_are_created_and_removed_with_echo(tmp_path: Path) -> None:
    uuid = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    with mount(tmp_path / "host", "4xT4"):
        types = tmp_path / "host/sys/class/mdev_bus/0000:86:00.0/mdev_supported_types"
        live = tmp_path / "host/sys/bus/mdev/devices"
        before = shell("ls", live).stdout.split()
        assert shell(f"/bin/echo {uuid} > nvidia-233/create", types).returncode == 0
        assert shell("cat nvidia-233/available_instances", types).stdout == "1\n"
        assert shell(f"/bin/echo {uuid} > nvidia-233/create", types).stderr.endswith("write error: File exists\n")
        assert sorted([*before, uuid]) == shell("ls", live).stdout.split()
        assert shell(f"/bin/echo 1 > {uuid}/remove", live).returncode == 0
        assert shell("ls", live).stdout.split() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("touch sys/new", "Permission denied"),
        ("mkdir sys/new", "Operation not permitted"),
        ("rm sys/bus/pci/devices/0000:65:00.0/vendor", "Operation not permitted"),
        ("cat sys/bus/pci/drivers_probe", "Permission denied"),
        ("cat sys/bus/pci/devices/0000:99:00.0/vendor", "No such file or directory"),
        ("sh -c 'echo x > sys/bus/pci/devices/0000:65:00.0/vendor'", "Permission denied"),
        ("ln -s x sys/x", "Operation not permitted"),
        ("mv sys/bus sys/b", "Operation not permitted"),
    ],
)
def test_the_kernels_folders_refuse_changes(tmp_path: Path, command: str, message: str) -> None:
    with mount(tmp_path / "host", "2xA10"):
        done = shell(command, tmp_path / "host")
        assert done.returncode != 0
        assert message in done.stderr


def test_other_folders_accept_files(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10"):
        host = tmp_path / "host"
        commands = "mkdir -p var/lib/x && echo one > var/lib/x/a && mv var/lib/x/a var/lib/x/b && chmod 600 var/lib/x/b"
        assert shell(commands, host).returncode == 0
        assert shell("cat var/lib/x/b; stat -c %a var/lib/x/b", host).stdout == "one\n600\n"
        assert shell("ln -s b var/lib/x/l && cat var/lib/x/l && rm -r var/lib/x", host).stdout == "one\n"
        assert {"dev", "proc", "sys", "var"} <= set(shell("ls", host).stdout.split())


def test_nodes_are_devices_or_open_once(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10"):
        assert shell("stat -c '%F %t:%T' dev/vfio/12", tmp_path / "host").stdout == "character special file 1:3\n"
    with mount(tmp_path / "host", "2xA10", "--nodes", "files"):
        done = shell("exec 3<>dev/vfio/12; cat dev/vfio/12", tmp_path / "host")
        assert "Device or resource busy" in done.stderr
        assert shell("cat dev/vfio/12", tmp_path / "host").returncode == 0


def test_the_agent_follows_changes_by_other_programs(tmp_path: Path, short_path: Path) -> None:
    host, kubelet = tmp_path / "host", short_path / "kubelet"
    (kubelet / "device-plugins").mkdir(parents=True)

    def offered() -> str:
        return shell(f"{sys.executable} -m gpuvirt devices --host-root {host}", tmp_path).stdout

    with mount(host, "2xA10", "--nodes", "files"):
        options = ["--host-root", str(host), "--kubelet-dir", str(kubelet), "--listen", ""]
        with subprocess.Popen([*GPUVIRT, "node", *options], stderr=subprocess.PIPE, text=True) as agent:
            until(lambda: "from agent" in offered())
            assert shell("cat var/lib/gpuvirt/ledger.json", host).returncode == 0
            assert shell("ls run/cdi", host).stdout.split() == ["gpuvirt-nvidia.com_GA102GL_A10.json"]
            assert shell("rm dev/vfio/12", host).returncode == 0
            until(lambda: "NodeMissing" in offered())
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(100) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_ends_leaves_nothing_mounted(tmp_path: Path, number: signal.Signals) -> None:
    with mount(tmp_path / "host", "2xA10") as server:
        assert os.path.ismount(tmp_path / "host")
        server.send_signal(number)
        assert server.wait(100) == (-number if number is signal.SIGKILL else 0)
        until(lambda: not _mounted(tmp_path / "host"))
    assert list((tmp_path / "host").iterdir()) == []


def test_unmounting_ends_the_server(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10") as server:
        until(lambda: shell("umount host || fusermount3 -u host", tmp_path).returncode == 0)
        assert server.wait(100) == 0


@pytest.mark.parametrize(
    ("prepare", "message"),
    [("true", "No such file or directory"), ("mkdir host && touch host/x", "is not empty")],
)
def test_a_folder_that_cannot_be_mounted_on(tmp_path: Path, prepare: str, message: str) -> None:
    shell(prepare, tmp_path)
    done = subprocess.run(
        [*GPUVIRT, "sim", "mount", str(tmp_path / "host")], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def _mounted(folder: Path) -> bool:
    return f" {folder} " in Path("/proc/mounts").read_text()
