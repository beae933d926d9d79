"""`gpuvirt vgpu types` says how many vGPUs of a type fit on a GPU, and not how many VFs could carry one."""

import json
from pathlib import Path

import pytest

from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from tests.cli.commandline import gpuvirt, ran


@pytest.mark.parametrize(
    ("host", "gpu", "left"),
    [
        ("2xA10-sriov", "0000:65:00.0", {"A10-24Q": 1, "A10-12Q": 2, "A10-4Q": 6, "A10-1Q": 24}),
        ("4xT4", "0000:af:00.0", {"T4-16Q": 0, "T4-8Q": 1}),
    ],
)
def test_a_type_fits_as_often_as_the_card_holds_it(host: str, gpu: str, left: dict[str, int]) -> None:
    done = gpuvirt("sim", "run", "-H", host, "--snapshot", "--", "gpuvirt", "vgpu", "types", gpu, "-o", "json")
    rows = json.loads(done.stdout)
    assert {row["name"]: row["left"] for row in rows if row["name"] in left} == left


@pytest.mark.parametrize(
    ("driver", "board", "modules", "why"),
    [
        (
            "nvidia",
            "A10",
            ("nvidia",),
            "can't carry vGPUs: its driver nvidia creates no vGPUs on it; the vGPU manager's driver does",
        ),
        (
            "nvidia",
            "RTX4090",
            ("nvidia",),
            "can't carry vGPUs: its driver nvidia creates no vGPUs on it; the vGPU manager's driver does",
        ),
        ("nvidia", "A10", ("nvidia", "nvidia_vgpu_vfio"), "carries no vGPUs, since its VFs are off"),
        ("vfio-pci", "A10", (), "can't carry vGPUs: it is bound to a VFIO driver"),
    ],
)
@pytest.mark.parametrize("command", [("types",), ("types", "65:00.0"), ("scheduler", "get")])
def test_a_host_on_which_no_gpu_can_carry_vgpus_is_told_what_it_needs(
    tmp_path: Path, driver: str, board: str, modules: tuple[str, ...], why: str, command: tuple[str, ...]
) -> None:
    slots = (SlotSpec(at="0000:65:00.0", board=board, driver=driver, group=12),)
    export(build_host(HostSpec(about="one GPU", slots=slots, platform=PlatformSpec(modules=modules))), tmp_path)
    done = ran("vgpu", *command, "--host-root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert text.startswith("No GPU to list now ")
    assert f": 0000:65:00.0 {why}" in text


@pytest.mark.parametrize(("manager", "lacks"), [("host", False), ("none", True)])
def test_a_gpu_whose_vfs_are_off_is_listed_with_what_switches_them_on(manager: str, lacks: bool) -> None:
    run = ("sim", "run", "-H", "2xA10-vgpu", "--vgpu-manager", manager, "--", "sh", "-c")
    done = gpuvirt(*run, "gpuvirt vgpu types; gpuvirt vgpu create 0000:b1:00.0 A10-24Q")
    text = " ".join(done.stdout.split())
    assert text.startswith("GPU TYPE")
    fix = "gpuvirt vgpu create 0000:b1:00.0 TYPE, gpuvirt vgpu apply, or the agent for a vGPU config, switches them on"
    assert (fix in text, "0000:b1:00.0: carries 1 A10-24Q" in text) == (not lacks, not lacks)
    missing = (
        "PrerequisiteMissing: 0000:b1:00.0 carries no vGPUs, since its VFs are off and the step that switches them on"
        " needs sriov-manage, which is not installed"
    )
    assert text.count(missing) == 2 * lacks, "the list has the reason of the refusal"
    assert text.count("fix: install NVIDIA's vGPU manager on the host") == 2 * lacks
    assert "0000:b1:00.0: switch its VFs on" not in text or not lacks


@pytest.mark.parametrize("modules", [(), ("nvidia", "nvidia_vgpu_vfio")], ids=["not loaded", "the vGPU manager's"])
def test_a_dry_run_with_rebind_promises_vgpus_only_on_a_driver_that_is_loaded(
    tmp_path: Path, modules: tuple[str, ...]
) -> None:
    gpu = "0000:65:00.0"
    slots = (SlotSpec(at=gpu, board="A10", driver="vfio-pci", group=12),)
    export(build_host(HostSpec(about="one GPU", slots=slots, platform=PlatformSpec(modules=modules))), tmp_path)
    done = ran("vgpu", "apply", "-c", "A10-12Q", "--rebind", "--dry-run", "--host-root", str(tmp_path))
    assert f"would: {gpu}: unbind from vfio-pci" in done.stdout
    promised, unknown = "would then carry 2 A10-12Q", "NVIDIA's driver is not loaded, so it is not known whether"
    expected = (0, True, False) if modules else (1, False, True)
    assert (done.returncode, promised in done.stdout, unknown in done.stdout) == expected, done.stdout


def test_vgpus_of_other_sizes_take_their_part_of_the_card() -> None:
    done = gpuvirt("sim", "run", "-H", "2xA10-vgpu", "--snapshot", "--", "gpuvirt", "vgpu", "types", "-o", "json")
    rows = json.loads(done.stdout)
    gpu = next(row["gpu"] for row in rows if row["there"])
    parts = {"A10-12Q": 12, "A10-4Q": 4, "A10-8Q": 8, "A10-1Q": 1, "A10-2Q": 2, "A10-6Q": 6, "A10-3Q": 3}
    taken = sum(parts[row["name"]] * row["there"] for row in rows if row["gpu"] == gpu and row["there"])
    assert taken > 0
    (small,) = (row["left"] for row in rows if row["gpu"] == gpu and row["name"] == "A10-1Q")
    assert small == 24 - taken
