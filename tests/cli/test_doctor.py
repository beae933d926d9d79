"""`gpuvirt doctor` and `gpuvirt why`, as a user calls them."""

import json
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from gpuvirt.diagnosis.diagnosis import CHECKS
from gpuvirt.diagnosis.explanation import StageName
from gpuvirt.diagnosis.findings import Area
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import GPUVIRT, gpuvirt, ran

WIDE = {"COLUMNS": "300"}


class On(Protocol):
    """Runs a command on a host."""

    def __call__(
        self, simulated: str, *arguments: str, environment: Mapping[str, str] = ...
    ) -> "subprocess.CompletedProcess[str]": ...


@pytest.fixture(scope="module", name="on")
def exported(tmp_path_factory: pytest.TempPathFactory) -> On:
    """Run a command on a host that was exported to a folder."""
    folder = tmp_path_factory.mktemp("hosts")

    def on(
        simulated: str, *arguments: str, environment: Mapping[str, str] = WIDE
    ) -> "subprocess.CompletedProcess[str]":
        if not (folder / simulated).exists():
            export(build_host(load_host(simulated)), folder / simulated)
        return ran(*arguments, environment={"GPUVIRT_HOST_ROOT": str(folder / simulated), **environment})

    return on


def test_a_healthy_host_is_described_in_one_line(on: On) -> None:
    done = on("2xA10", "doctor", "--strict")
    assert (done.returncode, done.stderr) == (0, "")
    line = " ".join(done.stdout.split())
    assert re.match(
        r"All checks are ok \(\d+ findings of \d+ checks; --all shows them\)\. 2 GPUs found: 2 offered", line
    )
    every = on("2xA10", "doctor", "--all").stdout
    assert every.startswith(done.stdout)
    assert "seen: /dev/kvm: there" in every
    areas = [line for line in every.splitlines()[1:] if line and not line.startswith(" ")]
    assert areas == [area for area in Area if area in areas]
    assert {"firmware", "devices"} <= set(areas)


def test_an_error_exits_with_1_and_lists_all_findings(on: On) -> None:
    done = on("2xA10-no-iommu", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    for part in ("IommuOff: the IOMMU is off", "seen: /proc/cmdline: ", "why:  without it", "fix:  in the firmware"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("ledger", "target", "code", "message"),
    [
        ("", "0000:65:00.0", "AllocatedToPod", "is allocated to pod 8f0c"),
        ("torn", "0000:65:00.0", "AllocatedToPod", "is allocated to pod 8f0c"),
        ("", "0000:ca:00.0", None, ""),
        ("torn", "0000:ca:00.0", "AllocationsUnknown", "0000:ca:00.0 may be allocated to a pod"),
    ],
)
def test_why_has_the_pods_of_another_plugins_devices_and_calls_none_free_that_may_be_allocated(
    tmp_path: Path, short_path: Path, ledger: str, target: str, code: str | None, message: str
) -> None:
    export(build_host(load_host("2xA10")), tmp_path)
    resource, gpus, plugins = "nvidia.com/GA102GL_A10", ["0000:65:00.0", "0000:ca:00.0"], short_path / "device-plugins"
    given = {"PodUID": "8f0c", "ContainerName": "compute", "ResourceName": resource, "DeviceIDs": {"-1": gpus[:1]}}
    plugins.mkdir()
    (plugins / "kubelet_internal_checkpoint").write_text(
        json.dumps({"Data": {"PodDeviceEntries": [given], "RegisteredDevices": {resource: gpus}}, "Checksum": 1})
    )
    if ledger:
        (tmp_path / "var/lib/gpuvirt").mkdir(parents=True)
        (tmp_path / "var/lib/gpuvirt/ledger.json").write_text(ledger)
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(plugins / "kubelet.sock"))
        kubelet.listen()
        done = ran("why", target, "--host-root", str(tmp_path), "--kubelet-dir", str(short_path), "-o", "json")
    blocker = json.loads(done.stdout)["blocker"]
    assert (done.returncode, blocker and blocker["code"]) == (int(code is not None), code), done.stdout
    assert message in (f"{blocker['subject']} {blocker['message']}" if blocker else "")


@pytest.mark.parametrize(
    ("simulated", "options", "status"),
    [
        ("2xRTX4090-one-group", [], 0),
        ("2xRTX4090-one-group", ["--strict"], 2),
        ("2xRTX4090-one-group", ["--strict", "-o", "json"], 2),
        ("2xA10-no-iommu", ["--strict"], 1),
    ],
)
def test_a_warning_exits_with_0_or_by_strict_with_2(
    on: On, simulated: str, options: Sequence[str], status: int
) -> None:
    assert on(simulated, "doctor", *options).returncode == status


def test_the_causes_come_first_and_fit_a_screen(on: On) -> None:
    screen = {"COLUMNS": "80", "LINES": "24"}
    done = on("vm-2xV100", "doctor", environment=screen)
    lines = done.stdout.splitlines()
    assert lines[0] == "4 errors, 1 warning: NoVirtualization, KvmMissing, IommuOff, VfioMissing,"
    assert len(lines) < 24
    assert lines[-1] == "evidence and fix of each: gpuvirt doctor --all"
    of_level = [line.split()[0] for line in lines if line.startswith(("  error ", "  warning "))]
    assert of_level == ["error"] * 4 + ["warning"]
    every = on("vm-2xV100", "doctor", "--all", environment=screen).stdout
    assert every.partition("\n\nfirmware\n")[0].count("fix: ") == 5
    few = on("vm-2xV100", "doctor", environment=screen | {"LINES": "8"}).stdout.splitlines()
    assert few[-1] == "4 more, and evidence and fix of each: gpuvirt doctor --all"
    assert few[:8] == lines[:8], "the first is always printed in full"


def test_doctor_as_json(on: On) -> None:
    done = on("2xA10-no-iommu", "doctor", "-o", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["version"], report["level"]) == (1, 1, "error")
    assert [result["check"] for result in report["results"]] == [check.name for check in CHECKS]
    assert {result["area"] for result in report["results"]} == set(Area)
    off = next(
        finding for result in report["results"] for finding in result["findings"] if finding["code"] == "IommuOff"
    )
    assert off.keys() == {"level", "subject", "message", "code", "seen", "why", "fix"}
    assert off["seen"][0] == {"path": "/sys/kernel/iommu_groups", "value": "empty"}


def test_an_empty_root_is_unknown_and_not_an_error(tmp_path: Path) -> None:
    done = ran("doctor", "--host-root", str(tmp_path))
    assert "Traceback" not in done.stderr
    assert "unknown" in done.stdout


@pytest.mark.parametrize("text", ["kind: KubeVirt\nspec: [", "kind: Pod", "", "\x00"])
def test_an_invalid_kubevirt_file_exits_with_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "kubevirt.yaml").write_text(text)
    for command in (["doctor"], ["why", "0000:65:00.0"]):
        done = ran(*command, "--kubevirt", str(tmp_path / "kubevirt.yaml"), "--host-root", str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert "kubevirt.yaml" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert ran("doctor", "--kubevirt", str(tmp_path / "none")).returncode == 2


def test_kubevirt_from_standard_input() -> None:
    example = Path(__file__).parent.parent.parent / "examples/kubevirt.yaml"
    command = " ".join([*GPUVIRT, "doctor", "--kubevirt", "-", "-o", "json", "<", str(example)])
    done = gpuvirt("sim", "run", "-H", "2xA10", "--", "sh", "-c", command)
    results = json.loads(done.stdout)["results"]
    reported = next(result["findings"] for result in results if result["check"] == "permitted_names")
    assert [finding["subject"] for finding in reported] == ["nvidia.com/GA102GL_A10"]


def test_why_names_the_blocker_of_a_gpu(on: On) -> None:
    done = on("4xT4", "why", "86:00.0")
    assert (done.returncode, done.stderr) == (1, "")
    assert "blocked  driver" in done.stdout
    assert "NoVgpus" in done.stdout
    assert "gpuvirt vgpu create 0000:86:00.0" in done.stdout


def test_why_as_json(on: On) -> None:
    done = on("2xA10", "why", "GA102GL_A10", "-o", "json")
    explanation = json.loads(done.stdout)
    assert (done.returncode, explanation["version"], explanation["resource"]) == (1, 1, "nvidia.com/GA102GL_A10")
    assert [stage["step"] for stage in explanation["stages"]] == list(StageName)
    assert explanation["blocker"]["code"] == "KubeletAway"


@pytest.mark.parametrize("target", ["a b", "", "nvidia.com/"])
def test_why_of_an_unknown_target_exits_with_2(on: On, target: str) -> None:
    done = on("2xA10", "why", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected 0000:65:00.0" in done.stderr


@pytest.mark.parametrize("command", [("devices",), ("doctor",), ("why", "0000:65:00.0")])
def test_settings_that_match_no_gpu_are_reported_by_all_commands(
    on: On, tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = tmp_path / "node.yaml"
    config.write_text('mode: vgpu\nmodes: {"0000:66:00.0": passthrough}\n')
    done = on("2xA10", *command, "--config", str(config))
    reported = " ".join(done.stdout.split())
    assert "ConfigInvalid: settings $.modes.0000:66:00.0 names '0000:66:00.0'" in reported
    assert "did you mean 0000:65:00.0?" in reported


@pytest.mark.parametrize("command", [("node",), ("devices",), ("doctor",), ("why", "0000:65:00.0")])
@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            "mode: vgpus\n",
            "$.mode: expected one of: unmanaged, passthrough",
        ),
        ('modes: {"65:zz": vgpu}\n', "$.modes.65:zz: '65:zz' is not a PCI address"),
        ("mods: {}\n", "$.mods: no such key; expected one of: "),
        ('mode: container\nmodes: {"0000:65:00.0": vgpu}\n', "container and vgpu can't be on one node"),
    ],
)
def test_unreadable_settings_make_every_command_exit_with_2(
    on: On, tmp_path: Path, command: tuple[str, ...], text: str, reported: str
) -> None:
    config = tmp_path / "node.yaml"
    config.write_text(text)
    done = on("2xA10", *command, "--config", str(config))
    assert (done.returncode, reported in done.stderr, str(config) in done.stderr) == (2, True, True), done.stderr
