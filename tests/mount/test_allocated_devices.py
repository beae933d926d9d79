"""Commands that change devices leave those alone that the kubelet has allocated to pods, and name the pod."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.agent.store import agentstate
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.model.allocation.ledger import Entry, Ledger
from gpuvirt.model.devices.candidates import Target
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.kubelet.containers import Claim
from tests.agent.kubelet.givingkubelet import kubelet_with_pod
from tests.mount.mounting import GPUVIRT, mount, shell

pytestmark = pytest.mark.ring("mount")

COMMAND = " ".join(GPUVIRT)
VFIO_MANAGE = f"{sys.executable} -c 'from gpuvirt.cli.main import vfio_manage; vfio_manage()'"
VGPU_DM = f"{sys.executable} -c 'from gpuvirt.cli.main import nvidia_vgpu_dm; nvidia_vgpu_dm()'"
RTX, OTHER_RTX = "0000:04:00.0", "0000:af:00.0"
T4, FREE_T4 = "0000:3b:00.0", "0000:86:00.0"
UUID = gpu_uuid(PciAddress(FREE_T4))
MIG = "MIG-0a1b2c3d-0000-5000-8000-000000000000"
CONFIG = "version: v1\nvgpu-configs:\n  quarters:\n    - {devices: all, vgpu-devices: {T4-4Q: 4}}\n"


def driver(folder: Path, address: str) -> str:
    return (folder / "host/sys/bus/pci/devices" / address / "driver").readlink().name


def mdevs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "host/sys/bus/mdev/devices").iterdir())


@pytest.mark.parametrize("command", [f"{COMMAND} vfio unbind {RTX}", f"{VFIO_MANAGE} unbind -d {RTX}"])
def test_a_gpu_of_a_pod_stays_with_its_vfio_driver(tmp_path: Path, short_path: Path, command: str) -> None:
    where = f"--host-root host --kubelet-dir {short_path}/k"
    with mount(tmp_path / "host", "4xRTX2060"):
        free = shell(f"{command} {where}", tmp_path)
        assert (free.returncode, driver(tmp_path, RTX)) == (0, "nvidia"), free.stdout
        assert shell(f"{COMMAND} vfio bind {RTX} {where}", tmp_path).returncode == 0
        with kubelet_with_pod(short_path / "k", "nvidia.com/TU106_GEFORCE_RTX_2060", RTX):
            done = shell(f"{command} {where}", tmp_path)
            assert (done.returncode, driver(tmp_path, RTX)) == (1, "vfio-pci")
            assert f"AllocatedToPod: {RTX} is allocated to pod default/cuda" in " ".join(done.stdout.split())
        (stopped := short_path / "k/pod-resources/kubelet.sock").unlink(missing_ok=True)
        done = shell(f"{command} {where} --assume-unallocated", tmp_path)
        assert (done.returncode, driver(tmp_path, RTX), stopped.exists()) == (1, "vfio-pci", False)
        assert "is allocated to pod 00000000-0000-4000-9000-000000000001" in " ".join(done.stdout.split())


def test_an_unreadable_account_is_unknown(tmp_path: Path, short_path: Path) -> None:
    checkpoint = short_path / "k/device-plugins/kubelet_internal_checkpoint"
    where = f"{RTX} --host-root host --kubelet-dir {short_path}/k"
    with (
        mount(tmp_path / "host", "4xRTX2060"),
        kubelet_with_pod(short_path / "k", "nvidia.com/TU106_GEFORCE_RTX_2060", OTHER_RTX),
    ):
        checkpoint.write_text('{"Data":{}}')
        done = shell(f"{COMMAND} vfio unbind {where}", tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (1, "vfio-pci")
        assert f"AllocationsUnknown: {RTX} may be allocated to a pod" in " ".join(done.stdout.split())
        assert "kubelet_internal_checkpoint" in "".join(done.stdout.split())
        held = shell(f"{COMMAND} vfio unbind {where} --assume-unallocated".replace(RTX, OTHER_RTX), tmp_path)
        assert (held.returncode, driver(tmp_path, OTHER_RTX)) == (1, "vfio-pci"), "known allocations count"
        done = shell(f"{COMMAND} vfio unbind {where} --assume-unallocated", tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (0, "nvidia"), done.stdout


def test_the_agents_ledger_counts_for_allocations_that_no_kubelet_reports(tmp_path: Path, short_path: Path) -> None:
    kubelet, resource = short_path / "k", ResourceName("nvidia.com/TU106_GEFORCE_RTX_2060")
    gpu, command = PciAddress(RTX), f"{COMMAND} vfio unbind {RTX} --host-root host --kubelet-dir {kubelet}"
    entry = Entry(resource, DeviceId(RTX), Target(gpu), None, "1", since=RealClock().now())
    ledger = kubelet / "device-plugins/gpuvirt/ledger.json"
    with mount(tmp_path / "host", "4xRTX2060"), kubelet_with_pod(kubelet, resource, OTHER_RTX):
        ledger.parent.mkdir()
        ledger.write_bytes(agentstate.LEDGER.encode(Ledger((entry,))))
        done = shell(command, tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (1, "vfio-pci")
        assert "a pod that is being admitted" in " ".join(done.stdout.split())
        ledger.write_text("torn")
        assert "AllocationsUnknown" in shell(command, tmp_path).stdout
        ledger.unlink()
        assert shell(command, tmp_path).returncode == 0


def test_a_vgpu_of_a_pod_stays(tmp_path: Path, short_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    where = f"--host-root host --kubelet-dir {short_path}/k"
    with mount(tmp_path / "host", "4xT4"):
        parent = (tmp_path / f"host/sys/class/mdev_bus/{T4}").resolve()
        given, free = [mdev for mdev in mdevs(tmp_path) if (parent / mdev).exists()]
        with kubelet_with_pod(short_path / "k", "nvidia.com/GRID_T4-8Q", given):
            kept = shell(f"{COMMAND} vgpu delete {given} {where}", tmp_path)
            assert (kept.returncode, given in mdevs(tmp_path)) == (1, True)
            assert "pod default/cuda" in kept.stdout
            done = shell(f"{VGPU_DM} apply -f config.yaml {where}", tmp_path)
            assert (done.returncode, given in mdevs(tmp_path)) == (1, True)
            assert "pod default/cuda" in done.stdout
            done = shell(f"{COMMAND} vgpu apply -c T4-4Q {where}", tmp_path)
            assert (done.returncode, given in mdevs(tmp_path)) == (1, True)
        assert free not in mdevs(tmp_path), "free vGPUs were replaced"
        (short_path / "k/device-plugins/kubelet_internal_checkpoint").write_text("{")
        unknown = shell(f"{COMMAND} vgpu delete {given} {where}", tmp_path)
        assert (unknown.returncode, given in mdevs(tmp_path)) == (1, True)
        assert "AllocationsUnknown" in unknown.stdout


@pytest.mark.parametrize(
    ("devices", "claims", "reason"),
    [
        ([UUID], (), "AllocatedToPod: 0000:86:00.0 is allocated to pod default/cuda"),
        ([f"{UUID}::0"], (), "AllocatedToPod: 0000:86:00.0 is allocated to pod default/cuda"),
        (
            [MIG],
            (),
            f"AllocationUnmapped: 0000:86:00.0 may be allocated to pod default/cuda, which has nvidia.com/gpu: {MIG};",
        ),
        (
            [T4],
            [Claim("gpu.nvidia.com", "gpu-3")],
            "AllocationUnmapped: 0000:86:00.0 may be allocated to pod default/dra, which has gpu.nvidia.com: gpu-3;",
        ),
    ],
)
def test_a_gpu_of_a_container_that_is_idle_stays_with_its_driver(
    tmp_path: Path, short_path: Path, devices: Sequence[str], claims: Sequence[Claim], reason: str
) -> None:
    where = f"{FREE_T4} --host-root host --kubelet-dir {short_path}/k"
    with mount(tmp_path / "host", "4xT4"):
        with kubelet_with_pod(short_path / "k", "nvidia.com/gpu", *devices, claims=claims):
            done = shell(f"{COMMAND} vfio bind {where}", tmp_path)
            assert (done.returncode, driver(tmp_path, FREE_T4)) == (1, "nvidia")
            assert reason in " ".join(done.stdout.split())
        other = where.replace("/k", "/other")
        with kubelet_with_pod(short_path / "other", "nvidia.com/gpu", gpu_uuid(PciAddress(T4))):
            done = shell(f"{COMMAND} vfio bind {other}", tmp_path)
            assert (done.returncode, driver(tmp_path, FREE_T4)) == (0, "vfio-pci"), done.stdout


ALLOCATE = """
import sys
from pathlib import Path
from gpuvirt.agent.change.gate.gate import Gate
with Gate(Path(sys.argv[1])).allocation({sys.argv[2].rpartition(".")[0]: [sys.argv[2]]}):
    pass
"""


def test_a_gpu_that_an_agent_has_allocated_stays_while_its_kubelet_runs(tmp_path: Path, short_path: Path) -> None:
    """The kubelet's account and the agent's ledger don't contain the allocation yet; the gate does."""
    command = f"{COMMAND} vfio unbind {RTX} --host-root host --kubelet-dir {short_path}/k"
    with mount(tmp_path / "host", "4xRTX2060"):
        gates = tmp_path / "host/run/gpuvirt/gate"
        with kubelet_with_pod(short_path / "k", "nvidia.com/TU106_GEFORCE_RTX_2060", OTHER_RTX):
            subprocess.run([sys.executable, "-c", ALLOCATE, str(gates), RTX], check=True)
            lock = gates / f"{RTX[:-2]}.lock"
            lock.write_text(f"1.0 {lock.read_text().split(' ', 1)[1]}")
            done = shell(command, tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (1, "vfio-pci")
        expected = f"AdmissionUnsettled: {RTX} may be allocated to a pod that is being admitted"
        assert expected in " ".join(done.stdout.split())
        assert shell(command, tmp_path).returncode == 0, "the kubelet has ended, and forgotten what it had not recorded"


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_vfio_manage_in_a_pod_of_its_own_pid_namespace(tmp_path: Path) -> None:
    """NVIDIA's vfio-manager pod has the host's / and no hostPID: /proc shows only its own processes."""
    pod = "unshare --pid --fork --mount-proc env HOST_ROOT=host"
    with mount(tmp_path / "host", "4xRTX2060"):
        done = shell(f"{pod} {VFIO_MANAGE} unbind -d {RTX}", tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (0, "nvidia"), done.stdout + done.stderr
        done = shell(f"{pod} {VFIO_MANAGE} bind --all", tmp_path)
        assert (done.returncode, driver(tmp_path, RTX)) == (0, "vfio-pci"), done.stdout + done.stderr
