"""Whether a pod of the node has started, by the kubelet's folder of pods."""

import os
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet.recordedallocations import PodFolder
from gpuvirt.hardware.usage.processes import has_usual_root
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.kernel import SimKernel
from tests.sim.simulated import Simulated


def test_the_start_of_a_pod_changes_what_the_folder_shows(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path, lambda: True)
    before = folder.read()
    assert before is not None
    assert folder.read() == before
    (tmp_path / "uid-of-a-pod").mkdir()
    assert folder.read() != before


def test_the_end_of_a_pod_does_not_restore_what_the_folder_showed(tmp_path: Path) -> None:
    os.utime(tmp_path, ns=(1, 1))  # the kernel's clock for files has ticks of some milliseconds
    folder = PodFolder(tmp_path, lambda: True)
    before = folder.read()
    (tmp_path / "uid-of-a-pod").mkdir()
    (tmp_path / "uid-of-a-pod").rmdir()
    assert folder.read() != before


def test_the_folder_of_another_kubelet_shows_nothing(tmp_path: Path) -> None:
    assert PodFolder(tmp_path, lambda: False).read() is None
    assert PodFolder(tmp_path / "missing", lambda: True).read() is None


def with_kubelet(kernel: SimKernel, command: str, line: str) -> SimKernel:
    process = kernel.start_process(command)
    kernel.tree.place(HostPath(f"/proc/{process.pid}/cmdline"), constant(line))
    return kernel


@pytest.mark.parametrize(
    ("command", "line", "is_usual"),
    [
        ("kubelet", "/usr/bin/kubelet\0--config=/etc/kubelet.yaml\0", True),
        ("kubelet", "/usr/bin/kubelet\0--root-dir=/data/kubelet\0", False),
        ("kubelite", "/snap/microk8s/kubelite\0--kubelet-args-file=/args\0", False),
        ("k3s-server", "/usr/local/bin/k3s\0server\0", False),
    ],
)
def test_only_a_kubelet_with_all_its_flags_on_its_command_line_has_the_usual_folder(
    simulated: Simulated, command: str, line: str, is_usual: bool
) -> None:
    assert has_usual_root(with_kubelet(simulated("2xA10"), command, line)) is is_usual


def test_without_a_kubelet_or_its_command_line_the_folder_is_unknown(simulated: Simulated) -> None:
    assert not has_usual_root(simulated("2xA10"))
    kernel = simulated("2xA10")
    kernel.start_process("kubelet")
    assert not has_usual_root(kernel)
