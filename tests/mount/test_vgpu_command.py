"""`gpuvirt vgpu` and `nvidia-vgpu-dm` on a mounted host, as a user runs them."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mount.mounting import GPUVIRT, mount, shell, until

pytestmark = pytest.mark.ring("mount")

VGPU = f"{' '.join(GPUVIRT)} vgpu"
VGPU_DM = f"{sys.executable} -c 'from gpuvirt.cli.main import nvidia_vgpu_dm; nvidia_vgpu_dm()'"
GPU, OTHER = "0000:3b:00.0", "0000:5e:00.0"
CONFIG = """version: v1
vgpu-configs:
  quarters:
    - {devices: [0], vgpu-devices: {T4-4Q: 4}}
"""


def carries(folder: Path, gpu: str) -> Counter[str]:
    types = list((folder / "host/sys/class/mdev_bus" / gpu / "mdev_supported_types").iterdir())
    made = {(path / "name").read_text().strip(): len(list((path / "devices").iterdir())) for path in types}
    return Counter({name: count for name, count in made.items() if count})


def test_apply_and_assert_change_what_differs(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "4xT4"):
        assert shell(f"{VGPU} assert -c T4-4Q --host-root host", tmp_path).returncode == 1
        planned = shell(f"{VGPU} apply -c T4-4Q --dry-run --host-root host", tmp_path)
        assert (planned.returncode, carries(tmp_path, GPU)) == (0, {"GRID T4-8Q": 2})
        assert f"{GPU}: would then carry 4 T4-4Q" in planned.stdout
        done = shell(f"{VGPU} apply -c T4-4Q --host-root host", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert carries(tmp_path, GPU) == carries(tmp_path, OTHER) == {"GRID T4-4Q": 4}
        assert shell(f"{VGPU} assert -c T4-4Q --host-root host", tmp_path).returncode == 0
        again = json.loads(shell(f"{VGPU} apply -c T4-4Q --host-root host -o json", tmp_path).stdout)
        assert [result["steps"] for result in again] == [[]] * 4


def test_one_by_one(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "4xT4"):
        listed = json.loads(shell(f"{VGPU} list --host-root host -o json", tmp_path).stdout)
        mine = [vgpu["id"] for vgpu in listed if vgpu["gpu"] == GPU]
        types = json.loads(shell(f"{VGPU} types {GPU} --host-root host -o json", tmp_path).stdout)
        assert {row["name"]: (row["there"], row["left"]) for row in types}["T4-8Q"] == (2, 0)
        full = shell(f"{VGPU} create {GPU} T4-8Q --host-root host", tmp_path)
        assert full.returncode == 1
        assert "NoRoom" in full.stdout
        gone = shell(f"{VGPU} delete {mine[0]} --host-root host", tmp_path)
        assert (gone.returncode, carries(tmp_path, GPU)) == (0, {"GRID T4-8Q": 1}), gone.stderr
        made = shell(f"{VGPU} create {GPU} 'GRID T4-8Q' --host-root host", tmp_path)
        assert (made.returncode, carries(tmp_path, GPU)) == (0, {"GRID T4-8Q": 2}), made.stderr
        unknown = shell(f"{VGPU} delete {GPU} --host-root host", tmp_path)
        assert unknown.returncode == 2
        assert "no such vGPU" in unknown.stderr


@pytest.mark.parametrize("change", ["vgpu delete", "vfio bind 0000:4b:00.0 --remove-vgpus"])
def test_a_command_that_meets_a_user_of_a_vgpu_removes_nothing_and_its_dry_run_says_so(
    tmp_path: Path, change: str
) -> None:
    """The simulated `/proc` does not show the process, as that of a container shows none of the host."""
    listing = f"{VGPU} list --host-root host -o json"
    with mount(tmp_path / "host", "2xA10-vgpu", "--nodes", "files"):
        before = shell(listing, tmp_path).stdout
        (used,) = (vgpu["id"] for vgpu in json.loads(before) if vgpu["group"] == 200)
        command = f"{' '.join(GPUVIRT)} {change} {used if change == 'vgpu delete' else ''} --host-root host"
        with (tmp_path / "host/dev/vfio/200").open("r+b"):
            planned, done = shell(f"{command} --dry-run", tmp_path), shell(command, tmp_path)
            assert (planned.returncode, planned.stdout) == (done.returncode, done.stdout)
            assert (done.returncode, done.stdout.startswith(f"VgpuInUse: {used} ")) == (1, True), done.stdout
            assert "/dev/vfio/200 is open in another process" in done.stdout
            assert "a command has to be repeated" in done.stdout, "no agent changes the GPU later"
            assert shell(listing, tmp_path).stdout == before
        assert shell(command, tmp_path).returncode == 0


def test_nvidias_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    with mount(tmp_path / "host", "4xT4"):
        dm = f"GPUVIRT_HOST_ROOT=host {VGPU_DM}"
        assert shell(f"{dm} assert -f config.yaml -a", tmp_path).returncode == 0
        assert shell(f"{dm} assert -f config.yaml -c quarters", tmp_path).returncode == 1
        done = shell(f"{dm} -d apply -f - -c quarters < config.yaml", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (carries(tmp_path, GPU), carries(tmp_path, OTHER)) == ({"GRID T4-4Q": 4}, {"GRID T4-1Q": 4})
        named = shell(f"VGPU_DM_CONFIG_FILE=config.yaml VGPU_DM_SELECTED_CONFIG=quarters {dm} assert", tmp_path)
        assert named.returncode == 0, "it checks the GPUs that the config is for"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("apply", "--config-file"),
        ("apply -f nowhere.yaml", "nowhere.yaml"),
        ("apply -f config.yaml -c eights", "no config 'eights'"),
        ("assert -f bad.yaml -a", "bad.yaml:4"),
    ],
)
def test_an_error_exits_with_1(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "bad.yaml").write_text(CONFIG.replace("T4-4Q: 4", "T4-04Q: 4"))
    done = shell(f"{VGPU_DM} {arguments}", tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_vgpus_that_an_agent_manages_are_left_to_it(tmp_path: Path) -> None:
    """The agent would undo the change; the reason names the label that makes it."""
    (tmp_path / "node.yaml").write_text("mode: vgpu\nvgpu_config: T4-8Q\n")
    (tmp_path / "kubelet/device-plugins").mkdir(parents=True)
    options = ["--host-root", "host", "--kubelet-dir", "kubelet", "--config", "node.yaml", "--listen", ""]
    with mount(tmp_path / "host", "4xT4"):
        with subprocess.Popen([*GPUVIRT, "node", *options], cwd=tmp_path, stderr=subprocess.DEVNULL) as agent:
            until((tmp_path / "host/run/gpuvirt/node.json").exists)
            until(lambda: "vgpu_config" in (tmp_path / "host/run/gpuvirt/node.json").read_text())
            done = shell(f"{VGPU} apply -c T4-4Q --host-root host --kubelet-dir kubelet", tmp_path)
            agent.terminate()
        assert done.returncode == 1
        assert "ManagedByAgent" in done.stdout
        assert "nvidia.com/vgpu.config=NAME" in done.stdout


FLEX, SPLIT = "0000:b3:00.0", "0000:4d:00.0"
QUARTER, HALF = (f"intel.com/ATSM_DATA_CENTER_GPU_FLEX_170_VF_1_{count}" for count in (4, 2))


def offered(folder: Path) -> dict[str, list[str]]:
    done = shell(f"{' '.join(GPUVIRT)} devices --host-root host -o json", folder)
    resources = json.loads(done.stdout)["resources"]
    return {found["name"]: [device["id"] for device in found["devices"]] for found in resources}


def test_a_gpu_is_split_for_vms_by_one_command_and_restored_by_another(tmp_path: Path) -> None:
    with mount(tmp_path / "host", "2xFlex170"):
        done = shell(f"{VGPU} create {FLEX} '2 VFs' --host-root host", tmp_path)
        assert (done.returncode, done.stdout.count("probe, for vfio-pci")) == (0, 2), done.stdout + done.stderr
        assert done.stdout.endswith(f"{FLEX}: carries 2 VFs\n")
        ((resource, vfs),) = offered(tmp_path).items()
        assert (resource, len(vfs)) == (HALF, 2)
        gone = shell(f"{VGPU} delete {FLEX} --host-root host", tmp_path)
        assert (gone.returncode, gone.stdout) == (0, f"{FLEX}: remove 2 VFs {FLEX}\n"), gone.stderr
        assert offered(tmp_path) == {}
        assert shell(f"{' '.join(GPUVIRT)} vfio bind {FLEX} --host-root host", tmp_path).returncode == 0


def test_existing_vfs_are_given_to_vms_and_returned(tmp_path: Path) -> None:
    vfio = f"{' '.join(GPUVIRT)} vfio"
    with mount(tmp_path / "host", "2xFlex170"):
        first, second, *others = sorted(
            (tmp_path / "host/sys/bus/pci/devices" / SPLIT / f"virtfn{number}").readlink().name for number in range(4)
        )
        status = shell(f"{vfio} status --host-root host", tmp_path).stdout
        assert status.count("possible: gpuvirt vfio bind") == 5, "the VFs and the other GPU"
        done = shell(f"{vfio} bind {first} {second} --host-root host", tmp_path)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{first}, {second}: bound for VMs"), done.stderr
        assert offered(tmp_path) == {QUARTER: [first, second]}
        why = shell(f"{' '.join(GPUVIRT)} why {others[0]} --host-root host", tmp_path)
        assert f"NativeDriver: {others[0]} is bound to xe" in why.stdout
        assert f"gpuvirt vfio bind {others[0]}" in why.stdout
        assert shell(f"{vfio} unbind {first} --host-root host", tmp_path).returncode == 0
        assert offered(tmp_path) == {QUARTER: [second]}
