"""`gpuvirt doctor` and `gpuvirt why`, as a person gives them."""

import json
from pathlib import Path

import pytest

from commandline import GPUVIRT, gpuvirt
from gpuvirt.model.diagnosis import CHECKS
from gpuvirt.model.findings import Area
from gpuvirt.model.way import Step


def on(machine: str, *arguments: str) -> list[str]:
    return ["sim", "run", "-m", machine, "--", *GPUVIRT, *arguments]


def test_a_host_in_order_is_told_of_in_a_few_lines() -> None:
    done = gpuvirt(*on("2xA10", "doctor"))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) < 10
    assert [line.split()[0] for line in lines[:-2]] == ["ok"] * (len(lines) - 2)
    assert lines[-1].startswith("All is in order")
    assert "seen:" not in done.stdout
    assert "seen: /dev/kvm: there" in gpuvirt(*on("2xA10", "doctor", "--all")).stdout


def test_an_error_ends_with_1_and_says_all() -> None:
    done = gpuvirt(*on("2xA10-no-iommu", "doctor"))
    assert (done.returncode, done.stderr) == (1, "")
    for part in ("IommuOff: the IOMMU is off", "seen: /proc/cmdline: ", "why:  without it", "fix:  in the firmware"):
        assert part in done.stdout


def test_a_warning_ends_with_0() -> None:
    done = gpuvirt(*on("2xRTX4090-one-group", "doctor"))
    assert (done.returncode, "SharedGroup" in done.stdout) == (0, True)


def test_as_json() -> None:
    done = gpuvirt(*on("2xA10-no-iommu", "doctor", "-o", "json"))
    report = json.loads(done.stdout)
    assert (done.returncode, report["version"], report["level"]) == (1, 1, "error")
    assert [one["check"] for one in report["results"]] == [one.name for one in CHECKS]
    assert {one["area"] for one in report["results"]} == set(Area)
    off = next(one for result in report["results"] for one in result["findings"] if one["code"] == "IommuOff")
    assert off.keys() == {"level", "subject", "message", "code", "seen", "why", "fix"}
    assert off["seen"][0] == {"path": "/sys/kernel/iommu_groups", "value": "empty"}


def test_an_empty_root_is_unknown_and_not_sick(tmp_path: Path) -> None:
    done = gpuvirt("doctor", "--host-root", str(tmp_path))
    assert "Traceback" not in done.stderr
    assert "unknown" in done.stdout


@pytest.mark.parametrize("text", ["kind: KubeVirt\nspec: [", "kind: Pod", "", "\x00"])
def test_a_bad_kubevirt_ends_with_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "kubevirt.yaml").write_text(text)
    for command in (["doctor"], ["why", "0000:65:00.0"]):
        done = gpuvirt(*command, "--kubevirt", str(tmp_path / "kubevirt.yaml"), "--host-root", str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert "kubevirt.yaml" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert gpuvirt("doctor", "--kubevirt", str(tmp_path / "none")).returncode == 2


def test_kubevirt_from_standard_input() -> None:
    example = Path(__file__).parent.parent.parent / "examples/kubevirt.yaml"
    command = " ".join([*GPUVIRT, "doctor", "--kubevirt", "-", "-o", "json", "<", str(example)])
    done = gpuvirt("sim", "run", "-m", "2xA10", "--", "sh", "-c", command)
    results = json.loads(done.stdout)["results"]
    told = next(one["findings"] for one in results if one["check"] == "permitted_names")
    assert [one["subject"] for one in told] == ["nvidia.com/GA102GL_A10"]


def test_why_a_gpu_cannot_be_had() -> None:
    done = gpuvirt(*on("4xT4", "why", "86:00.0"))
    assert (done.returncode, done.stderr) == (1, "")
    assert "blocked  driver" in done.stdout
    assert "NoVgpus" in done.stdout
    assert "uuidgen" in done.stdout


def test_why_as_json() -> None:
    done = gpuvirt(*on("2xA10", "why", "GA102GL_A10", "-o", "json"))
    way = json.loads(done.stdout)
    assert (done.returncode, way["version"], way["resource"]) == (1, 1, "nvidia.com/GA102GL_A10")
    assert [one["step"] for one in way["stages"]] == list(Step)
    assert way["blocker"]["code"] == "KubeletAway"


@pytest.mark.parametrize("target", ["a b", "", "nvidia.com/"])
def test_why_of_nothing_ends_with_2(target: str) -> None:
    done = gpuvirt(*on("2xA10", "why", target))
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected 0000:65:00.0" in done.stderr
