"""The simulated nvidia-smi and sriov-manage, as users call them."""

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.tools import Ended
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import host_names, load_host
from gpuvirt_sim.programs.tools import SimTools


def called(tools: SimTools, line: str) -> Ended:
    program, *arguments = line.split()
    return tools.run(program, arguments)


def tools_of(name: str) -> SimTools:
    return SimTools(build_host(load_host(name)))


@pytest.mark.parametrize("name", ["0", "0000:17:00.0", "00000000:17:00.0", "17:00.0", "uuid"])
def test_a_gpu_has_several_names(name: str) -> None:
    tools = tools_of("2xA30")
    uuid = called(tools, "nvidia-smi -L -i 0").stdout.rpartition("UUID: ")[2].strip(")\n")
    done = called(tools, f"nvidia-smi -q -i {uuid if name == 'uuid' else name}")
    assert (done.exit_code, done.stdout.count("GPU 00000000:17:00.0")) == (0, 1)


@pytest.mark.parametrize("name", ["2", "0000:18:00.0", "zzzz:17:00.0", "GPU-1", "", "0,7"])
def test_an_unknown_gpu_is_not_found(name: str) -> None:
    assert tools_of("2xA30").run("nvidia-smi", ["-q", "-i", name]).exit_code == 6


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("nvidia-smi --bogus", 2),
        ("nvidia-smi -i", 2),
        ("nvidia-smi bogus", 2),
        ("nvidia-smi -q=1", 2),
        ("nvidia-smi -mig maybe", 2),
        ("nvidia-smi vgpu -i 0 -shm 7", 2),
        ("nvidia-smi vgpu set-scheduler-state -i 1 -p 9", 2),
        ("nvidia-smi vgpu set-scheduler-state -i 1 -p 2 -t soon", 2),
        ("nvidia-smi mig -dgi -gi one", 2),
        ("nvidia-smi mig -cgi 1g.80gb", 2),
        ("nvidia-smi mig -cgi 4g.24gb", 23),
        ("nvidia-smi mig -cgi 2g.12gb:1", 2),
        ("nvidia-smi mig -dgi -gi 1", 19),
        ("nvidia-smi vgpu -i 0 -shm 1", 3),
        ("sriov-manage", 1),
        ("sriov-manage -e", 1),
        ("sriov-manage -e nowhere", 1),
        ("modprobe", 1),
    ],
)
def test_an_invalid_command_changes_nothing(line: str, code: int) -> None:
    kernel = build_host(load_host("2xA30"))
    tools = SimTools(kernel)
    before = called(tools, "nvidia-smi -q").stdout + called(tools, "nvidia-smi mig -lgi").stdout
    done = called(tools, line)
    assert done.exit_code == code
    assert done.output
    assert called(tools, "nvidia-smi -q").stdout + called(tools, "nvidia-smi mig -lgi").stdout == before


def test_gpu_instances_from_profiles_to_removal() -> None:
    tools = tools_of("2xA30")
    assert called(tools, "nvidia-smi -i 1 --multi-instance-gpu=1").exit_code == 0
    assert "|   1  MIG 2g.12gb        5         2/2" in called(tools, "nvidia-smi mig -i 1 -lgip").stdout
    assert called(tools, "nvidia-smi mig -i 1 -cgi 5,1g.6gb -C").exit_code == 0
    assert called(tools, "nvidia-smi mig -i 1 -lgi").stdout.count("MIG ") == 2
    assert called(tools, "nvidia-smi mig -i 1 -dgi").exit_code == 19, "they have compute instances"
    assert called(tools, "nvidia-smi mig -i 1 -dci").exit_code == 0
    assert called(tools, "nvidia-smi mig -i 1 -dgi").exit_code == 0
    assert called(tools, "nvidia-smi mig -i 1 -lgi").exit_code == 6


def test_commands_without_a_gpu_apply_to_all() -> None:
    tools = tools_of("2xA10-sriov")
    assert called(tools, "nvidia-smi vgpu -shm 1").stdout.count("Enabled") == 2
    assert called(tools, "nvidia-smi vgpu set-scheduler-state --policy=2").stdout.count("Successfully") == 2


@pytest.mark.parametrize("name", host_names())
def test_every_host_answers_queries(name: str) -> None:
    tools = tools_of(name)
    for line in ("", "-L", "-q", "mig -lgi", "vgpu", "vgpu -s", "vgpu -c -v", "vgpu -ss", "-h", "mig -h", "vgpu -h"):
        assert called(tools, f"nvidia-smi {line}").output
    assert max(len(row) for row in called(tools, "nvidia-smi").stdout.splitlines()) <= 80


def test_sriov_manage_of_all_leaves_gpus_of_other_drivers_alone() -> None:
    kernel = build_host(load_host("8xA100"))
    assert called(SimTools(kernel), "sriov-manage -d ALL").stdout.count("Disabling VFs on") == 5
    assert kernel.pci.functions[PciAddress("0000:87:00.0")].driver == "vfio-pci"
