"""The labs and the benchmarks remove the kubelet's folder if they have made it, and touch no other kubelet's."""

from pathlib import Path

import pytest
from bench.process import mount_point
from lab.cluster import leftovers


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    folder.mkdir()
    return folder


def run_kubelet(kubelet: Path) -> None:
    """Leave what a kubelet leaves when it has ended."""
    for name in ("pods/1/volumes", "device-plugins", "pki"):
        (kubelet / name).mkdir(parents=True)
    (kubelet / "cpu_manager_state").write_text("{}")


def test_the_lab_removes_a_folder_that_it_has_made(tmp_path: Path, lab: Path) -> None:
    kubelet = tmp_path / "var/kubelet"
    leftovers.make_kubelet_folder(lab, kubelet)
    run_kubelet(kubelet)
    leftovers.clear_kubelet_folder(lab, kubelet)
    assert not kubelet.exists()
    assert kubelet.parent.exists()


def test_the_lab_keeps_a_folder_that_was_there(tmp_path: Path, lab: Path) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    leftovers.make_kubelet_folder(lab, kubelet)
    run_kubelet(kubelet)
    leftovers.clear_kubelet_folder(lab, kubelet)
    assert list(kubelet.iterdir()) == []


def test_the_lab_keeps_files_that_are_not_its_kubelets(tmp_path: Path, lab: Path) -> None:
    kubelet = tmp_path / "kubelet"
    leftovers.make_kubelet_folder(lab, kubelet)
    (kubelet / "of-another-program").touch()
    leftovers.clear_kubelet_folder(lab, kubelet)
    assert [path.name for path in kubelet.iterdir()] == ["of-another-program"]


def test_without_a_lab_nothing_of_a_kubelet_is_removed(tmp_path: Path) -> None:
    kubelet = tmp_path / "kubelet"
    run_kubelet(kubelet)
    before = sorted(path for path in kubelet.rglob("*"))
    assert leftovers.kubelet_of_its_own(tmp_path / "lab", kubelet)
    leftovers.clear_kubelet_folder(tmp_path / "lab", kubelet)
    assert sorted(path for path in kubelet.rglob("*")) == before


def test_an_empty_folder_and_the_labs_own_belong_to_no_other_kubelet(tmp_path: Path, lab: Path) -> None:
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    assert not leftovers.kubelet_of_its_own(tmp_path / "none", kubelet)
    run_kubelet(kubelet)
    assert not leftovers.kubelet_of_its_own(lab, kubelet), "the lab was killed, and clears it before it starts again"


def test_a_benchmark_removes_a_folder_that_it_has_made(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.mkdir()
    for folder in (mine, theirs):
        with mount_point(folder):
            assert folder.is_dir()
    assert not mine.exists()
    assert theirs.exists()
    with mount_point(mine):
        (mine / "pods").mkdir()
    assert mine.exists(), "a kubelet uses it by now"
