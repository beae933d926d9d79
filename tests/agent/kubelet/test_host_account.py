"""The account of a host's kubelet that a command reads: complete, none without a kubelet, or unknown."""

import errno
import json
from functools import partial
from pathlib import Path

import pytest

from gpuvirt.agent.known.nokubelet import prove
from gpuvirt.agent.kubelet.hostaccount import AccountUnknownError, read_account
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.usage.processes import read_kubelets
from gpuvirt.model.allocation.recordhistory import RecordHistory
from gpuvirt.paths import HostPath, KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.containers import Claim
from tests.agent.kubelet.givingkubelet import kubelet_with_pod

ENTRY = {"PodUID": "u1", "ContainerName": "c", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": ["GPU-1"]}}
RUNS, STOPPED = (812,), ()
FIND = partial(prove, build_host(load_host("2xA10")))
BLIND = Unread(HostPath("/proc/1/ns/pid"), seen="pid:[4026532298]")


def paths(folder: Path, content: str | None = None) -> KubeletPaths:
    found = KubeletPaths(folder / "k")
    if content is not None:
        found.device_plugins.mkdir(parents=True)
        found.checkpoint.write_text(content)
    return found


def written(*entries: object) -> str:
    return json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1})


def test_a_host_without_folder_and_process_has_no_kubelet(tmp_path: Path) -> None:
    assert read_account(RecordedAllocations(paths(tmp_path), find_kubelet=FIND), STOPPED) is None
    with pytest.raises(AccountUnknownError):
        read_account(RecordedAllocations(paths(tmp_path)), STOPPED)


@pytest.mark.parametrize("kubelets", [RUNS, BLIND])
def test_the_account_is_unknown_without_a_folder_if_a_kubelet_may_run(
    tmp_path: Path, kubelets: tuple[int, ...] | Unread
) -> None:
    with pytest.raises(AccountUnknownError, match=r"it does not exist; (a kubelet runs \(pid 812|it is unknown)"):
        read_account(RecordedAllocations(paths(tmp_path), find_kubelet=FIND), kubelets)


def test_an_empty_folder_is_no_kubelet(tmp_path: Path) -> None:
    """A package or a mount may have created it; a kubelet that has run leaves files."""
    (tmp_path / "k").mkdir()
    assert read_account(RecordedAllocations(paths(tmp_path), find_kubelet=FIND), STOPPED) is None


def test_pods_of_a_kubelet_with_another_folder_are_unknown_whatever_is_known_of_this_folder(tmp_path: Path) -> None:
    kernel, history = build_host(load_host("2xA10")), RecordHistory(is_missing=True, is_absence_known=True)
    recorded = RecordedAllocations(paths(tmp_path), history=history, find_kubelet=partial(prove, kernel))
    kernel.start_process("sleep", pod="8a5c")
    with pytest.raises(AccountUnknownError, match="a kubelet has run: process 4001"):
        read_account(recorded, STOPPED)


def test_the_account_is_unknown_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "k/pods").mkdir(parents=True)
    with pytest.raises(AccountUnknownError, match=r"kubelet_internal_checkpoint: it does not exist yet"):
        read_account(RecordedAllocations(paths(tmp_path)), STOPPED)


@pytest.mark.parametrize("content", ["", "{", '{"Data":{}}', '{"data":{"PodDeviceEntries":null}}'])
def test_the_account_is_unknown_with_a_damaged_checkpoint(tmp_path: Path, content: str) -> None:
    with pytest.raises(AccountUnknownError, match="kubelet_internal_checkpoint"):
        read_account(RecordedAllocations(paths(tmp_path, content)), STOPPED)


def test_the_account_is_unknown_if_the_checkpoint_is_a_folder(tmp_path: Path) -> None:
    found = paths(tmp_path)
    found.checkpoint.mkdir(parents=True)
    with pytest.raises(AccountUnknownError, match="Is a directory"):
        read_account(RecordedAllocations(found), STOPPED)


def test_the_checkpoint_of_a_stopped_kubelet_is_the_account(tmp_path: Path) -> None:
    account = read_account(RecordedAllocations(paths(tmp_path, written(ENTRY))), STOPPED)
    assert {device: who.pod_uid for (_, device), who in (account or {}).items()} == {"GPU-1": "u1"}


@pytest.mark.parametrize("kubelets", [RUNS, BLIND])
def test_the_account_of_a_running_kubelet_is_unknown_without_its_api(
    tmp_path: Path, kubelets: tuple[int, ...] | Unread
) -> None:
    with pytest.raises(AccountUnknownError, match=r"no .*pod-resources/kubelet.sock") as caught:
        read_account(RecordedAllocations(paths(tmp_path, written(ENTRY))), kubelets)
    assert len(caught.value.known) == 1, "the checkpoint's allocations count even without the API"


def test_a_stale_socket_matters_only_while_the_kubelet_runs(short_path: Path) -> None:
    with kubelet_with_pod(short_path / "k", "nvidia.com/gpu", "GPU-1"):
        pass
    found = KubeletPaths(short_path / "k")
    found.pod_resources_socket.touch()
    assert len(read_account(RecordedAllocations(found), STOPPED) or ()) == 1
    with pytest.raises(AccountUnknownError, match="UNAVAILABLE"):
        read_account(RecordedAllocations(found), RUNS)


def test_the_account_has_the_api_and_the_checkpoint(short_path: Path) -> None:
    claim = Claim("gpu.nvidia.com", "gpu-0")
    with kubelet_with_pod(short_path / "k", "nvidia.com/gpu", "GPU-1", claims=[claim]):
        found = KubeletPaths(short_path / "k")
        found.checkpoint.write_text(written({**ENTRY, "DeviceIDs": {"-1": ["GPU-2"]}}))
        (found.pods / "u1").mkdir()
        account = read_account(RecordedAllocations(found), RUNS) or {}
        assert {device: who.text for (_, device), who in account.items()} == {
            "GPU-1": "pod default/cuda",
            "GPU-2": "pod u1",
            "gpu-0": "pod default/dra",
        }
        found.checkpoint.unlink()
        with pytest.raises(AccountUnknownError, match=r"checkpoint: it does not exist yet"):
            read_account(RecordedAllocations(found), RUNS)


def test_kubelet_processes_are_unread_where_processes_are_hidden() -> None:
    kernel = build_host(load_host("2xA10"))
    assert read_kubelets(kernel) == ()
    process = kernel.processes.next("kubelet")
    kernel.processes.show(process, [])
    assert read_kubelets(kernel) == (process.pid,)
    kernel.processes.hide()
    assert isinstance(read_kubelets(kernel), Unread)
    kernel.processes.hide(hidden=False)
    kernel.faults.fail(HostPath("/proc"), errno.EACCES)
    assert isinstance(read_kubelets(kernel), Unread)
