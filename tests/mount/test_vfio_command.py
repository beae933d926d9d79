"""`gpuvirt vfio` and `vfio-manage` on a mounted host, as a user runs them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.mounting import GPUVIRT, mount, shell, until

pytestmark = pytest.mark.ring("mount")

VFIO = f"{' '.join(GPUVIRT)} vfio"
VFIO_MANAGE = f"{sys.executable} -c 'from gpuvirt.cli.main import vfio_manage; vfio_manage()'"
GPU = "0000:04:00.0"


def driver(folder: Path, address: str) -> str | None:
    link = folder / "host/sys/bus/pci/devices" / address / "driver"
    try:
        return link.readlink().name
    except FileNotFoundError:
        return None


def test_bind_and_unbind(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "4xT4"):
        gpu = "0000:86:00.0"
        status = shell(f"{VFIO} status --host-root host", tmp_path)
        assert "possible: gpuvirt vfio bind" in status.stdout
        assert "CarriesVgpus: 0000:3b:00.0 carries 2 vGPUs" in status.stdout
        planned = shell(f"{VFIO} bind {gpu} --host-root host --dry-run", tmp_path)
        assert (planned.returncode, driver(tmp_path, gpu)) == (0, "nvidia")
        assert f"would: {gpu}: unbind from nvidia" in planned.stdout
        done = shell(f"{VFIO} bind {gpu} --host-root host", tmp_path)
        assert (done.returncode, driver(tmp_path, gpu)) == (0, "vfio-pci"), done.stderr
        assert done.stdout.splitlines()[-1] == f"{gpu}: bound for VMs"
        again = shell(f"{VFIO} bind {gpu} --host-root host -o json", tmp_path)
        assert [(result["steps"], result["reasons"]) for result in json.loads(again.stdout)] == [([], [])]
        back = shell(f"{VFIO} unbind {gpu} --host-root host", tmp_path)
        assert (back.returncode, driver(tmp_path, gpu)) == (0, "nvidia"), back.stderr


def test_a_dry_run_meets_the_user_that_the_unbind_would_meet(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xA10", "--nodes", "files"):
        unbind = f"{VFIO} unbind 0000:65:00.0 --host-root host"
        with (tmp_path / "host/dev/vfio/12").open("r+b"):
            planned, done = shell(f"{unbind} --dry-run", tmp_path), shell(unbind, tmp_path)
        assert (planned.returncode, planned.stdout) == (done.returncode, done.stdout)
        assert (done.returncode, done.stdout.split(":")[0]) == (1, "InUse")
        assert "/dev/vfio/12 is open in another process" in done.stdout


def test_all_moves_what_it_can_and_fails_for_the_rest(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "4xT4"):
        done = shell(f"{VFIO} bind --all --host-root host", tmp_path)
        assert done.returncode == 1
        assert done.stdout.count("CarriesVgpus") == 3
        assert driver(tmp_path, "0000:86:00.0") == "vfio-pci"
        assert driver(tmp_path, "0000:3b:00.0") == "nvidia"


def test_a_gpu_goes_from_vgpus_to_whole_use_and_back_by_one_plan_each(tmp_path: Path) -> None:
    gpu = "0000:3b:00.0"
    with mount(tmp_path / "host", "4xT4"):
        refused = shell(f"{VFIO} bind {gpu} --host-root host", tmp_path)
        assert (refused.returncode, driver(tmp_path, gpu)) == (1, "nvidia")
        assert "--remove-vgpus" in refused.stdout
        planned = shell(f"{VFIO} bind {gpu} --remove-vgpus --dry-run --host-root host -o json", tmp_path)
        done = shell(f"{VFIO} bind {gpu} --remove-vgpus --host-root host -o json", tmp_path)
        assert (done.returncode, driver(tmp_path, gpu)) == (0, "vfio-pci"), done.stdout + done.stderr
        steps = json.loads(done.stdout)[0]["steps"]
        assert json.loads(planned.stdout)[0]["steps"] == steps, "a dry run shows the whole plan"
        assert [step for step in steps if "remove" in step] == steps[:2]
        vgpu = f"{' '.join(GPUVIRT)} vgpu"
        (tmp_path / "one.yaml").write_text(
            "version: v1\nvgpu-configs: {a: [{devices: [0], vgpu-devices: {T4-4Q: 4}}]}\n"
        )
        would = shell(f"{vgpu} apply -f one.yaml -c a --rebind --dry-run --host-root host", tmp_path)
        assert f"{gpu}: unbind from vfio-pci" in would.stdout
        assert f"{gpu}: create 4 T4-4Q" in would.stdout
        back = shell(f"{vgpu} apply -f one.yaml -c a --rebind --host-root host", tmp_path)
        assert (back.returncode, driver(tmp_path, gpu)) == (0, "nvidia"), back.stdout + back.stderr
        assert f"{gpu}: carries 4 T4-4Q" in back.stdout


def test_gpus_on_the_datacenter_driver_are_refused_vgpus_before_any_step(tmp_path: Path) -> None:
    """2xA10 has no vGPU manager: `nvidia` is the datacenter driver there."""
    gpu = tmp_path / "host/sys/bus/pci/devices/0000:65:00.0"
    with mount(tmp_path / "host", "2xA10"):
        assert shell(f"{VFIO} unbind --all --host-root host", tmp_path).returncode == 0
        apply = f"{' '.join(GPUVIRT)} vgpu apply -c A10-12Q --host-root host -o json"
        planned, done = shell(f"{apply} --dry-run", tmp_path), shell(apply, tmp_path)
        assert (planned.returncode, done.returncode, (gpu / "virtfn0").exists()) == (1, 1, False)
        assert json.loads(planned.stdout) == json.loads(done.stdout)
        results = [
            (result["steps"], [reason["code"] for reason in result["reasons"]]) for result in json.loads(done.stdout)
        ]
        assert results == [([], ["NoVgpuHost"])] * 2


def test_nvidias_command_line(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "4xRTX2060"):
        done = shell(f"HOST_ROOT=host {VFIO_MANAGE} unbind --device-id {GPU}", tmp_path)
        assert (done.returncode, driver(tmp_path, GPU)) == (0, "nvidia"), done.stderr
        done = shell(f"{VFIO_MANAGE} bind -a --host-root host", tmp_path)
        assert (done.returncode, driver(tmp_path, GPU)) == (0, "vfio-pci"), done.stderr
        stranger = shell(f"{VFIO_MANAGE} bind -d 0000:ff:00.0 --host-root host", tmp_path)
        assert stranger.returncode == 0
        assert "not one of NVIDIA's devices" in stranger.stderr


def test_the_agent_keeps_gpus_on_their_desired_driver_and_commands_are_refused(
    tmp_path: Path, short_path: Path
) -> None:
    gpu, kubelet = "0000:86:00.0", short_path / "kubelet"
    (kubelet / "device-plugins").mkdir(parents=True)
    no_pods = '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 0}'
    (kubelet / "device-plugins/kubelet_internal_checkpoint").write_text(no_pods)
    (tmp_path / "node.yaml").write_text(f'modes: {{"{gpu}": passthrough}}\n')
    options = f"--host-root host --kubelet-dir {kubelet} --listen '' --config node.yaml"
    with mount(tmp_path / "host", "4xT4", "--nodes", "files"):
        with subprocess.Popen(
            ["/bin/sh", "-c", f"exec {' '.join(GPUVIRT)} node {options}"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        ) as agent:
            try:
                devices = f"{' '.join(GPUVIRT)} devices --host-root host"
                until(lambda: driver(tmp_path, gpu) == "vfio-pci")
                until(lambda: "TU104GL_TESLA_T4" in shell(devices, tmp_path).stdout)
                done = shell(f"{VFIO} unbind {gpu} --host-root host --kubelet-dir {kubelet}", tmp_path)
                assert (done.returncode, driver(tmp_path, gpu)) == (1, "vfio-pci")
                assert "ManagedByAgent" in done.stdout
                assert f'modes: {{"{gpu}": unmanaged}}' in " ".join(done.stdout.split())
            finally:
                agent.terminate()
            assert agent.wait(100) == 0
        assert driver(tmp_path, gpu) == "vfio-pci", "the agent's end changes nothing"


def test_a_command_beside_an_agent_that_leaves_gpus_alone(tmp_path: Path, short_path: Path) -> None:
    """The agent stops offering the GPU, and offers it again; beside a hanging agent the command is refused."""
    kubelet = short_path / "kubelet"
    (kubelet / "device-plugins").mkdir(parents=True)
    no_pods = '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 0}'
    (kubelet / "device-plugins/kubelet_internal_checkpoint").write_text(no_pods)
    where = f"--host-root host --kubelet-dir {kubelet}"
    with (
        mount(tmp_path / "host", "4xRTX2060", "--nodes", "files"),
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec {' '.join(GPUVIRT)} node {where} --listen ''"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        ) as agent,
    ):
        try:
            devices = f"{' '.join(GPUVIRT)} devices --host-root host"
            until(lambda: "TU106" in shell(devices, tmp_path).stdout)
            record = tmp_path / f"host/run/gpuvirt/gate/{GPU[:-2]}.json"
            done = shell(f"{VFIO} unbind {GPU} {where}", tmp_path)
            assert (done.returncode, driver(tmp_path, GPU)) == (0, "nvidia"), done.stdout + done.stderr
            assert json.loads(record.read_text())["acknowledged"] == 1
            done = shell(f"{VFIO} bind {GPU} {where}", tmp_path)
            assert (done.returncode, driver(tmp_path, GPU)) == (0, "vfio-pci"), done.stdout + done.stderr
            agent.send_signal(signal.SIGSTOP)
            done = shell(f"{VFIO} unbind {GPU} {where}", tmp_path)
            assert (done.returncode, driver(tmp_path, GPU)) == (1, "vfio-pci")
            assert "AgentSilent" in done.stdout
            assert json.loads(record.read_text())["state"] == "Open"
        finally:
            agent.send_signal(signal.SIGCONT)
            agent.terminate()
        assert agent.wait(100) == 0


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ("mode: whole", "$.mode"),
        ("modes: {x: passthrough}", "$.modes.x"),
        ('{mode: container, modes: {"0000:3b:00.0": vgpu}}', "$.modes.0000:3b:00.0"),
    ],
)
def test_invalid_settings(tmp_path: Path, settings: str, path: str) -> None:
    (tmp_path / "node.yaml").write_text(settings + "\n")
    done = shell(f"{' '.join(GPUVIRT)} node --config node.yaml --kubelet-dir . --listen ''", tmp_path)
    assert done.returncode == 2
    assert "node.yaml" in done.stderr
    assert path in done.stderr


def test_an_agent_without_privileges_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("mode: passthrough\n")
    done = shell(f"{' '.join(GPUVIRT)} node --plugin-only --config node.yaml --kubelet-dir . --listen ''", tmp_path)
    assert done.returncode == 2
    assert "$.mode: drivers of GPUs can't be changed with --plugin-only" in done.stderr


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_the_next_command_mends_what_a_killed_one_has_left(tmp_path: Path, lines: int) -> None:
    gpu = "0000:86:00.0"
    with mount(tmp_path / "host", "4xT4"):
        command = [*GPUVIRT, "vfio", "bind", gpu, "--host-root", "host"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            for _ in range(lines):
                killed.stdout.readline()
            killed.kill()
        done = shell(f"{VFIO} unbind {gpu} --host-root host", tmp_path)
        assert (done.returncode, driver(tmp_path, gpu)) == (0, "nvidia"), done.stdout
        assert (tmp_path / f"host/sys/bus/pci/devices/{gpu}/driver_override").read_text() == "(null)\n"
        assert (tmp_path / f"host/proc/driver/nvidia/gpus/{gpu}/unbindLock").read_text() == "0\n"
        journal = json.loads((tmp_path / "host/var/lib/gpuvirt/drivers.json").read_text())
        assert (journal["drivers"], journal["overrides"], journal.get("changes", {})) == ({}, {}, {})


def test_unbind_binds_the_native_driver_to_a_gpu_without_one(tmp_path: Path) -> None:
    gpu = "0000:86:00.0"
    with mount(tmp_path / "host", "4xT4"):
        unbind = f"echo {gpu} > host/sys/bus/pci/drivers/nvidia/unbind"
        assert (shell(unbind, tmp_path).returncode, driver(tmp_path, gpu)) == (0, None)
        done = shell(f"{VFIO} unbind {gpu} --host-root host", tmp_path)
        assert (done.returncode, driver(tmp_path, gpu)) == (0, "nvidia"), done.stdout
        assert (
            shell(f"{unbind}; echo nouveau > host/sys/bus/pci/devices/{gpu}/driver_override", tmp_path).returncode == 0
        )
        refused = shell(f"{VFIO} unbind {gpu} --host-root host", tmp_path)
        assert (refused.returncode, driver(tmp_path, gpu)) == (1, None)
        assert "DriverPinned" in refused.stdout
