"""`gpuvirt vgpu scheduler`: what it shows, sets, refuses, and persists for the next load of the driver."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.changes.vgpu import SchedulerOrder, kept_schedulers, set_scheduler, show_schedulers
from gpuvirt.cli.formats import ListFormat, ListOutput, Output
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import GpuModes, Scheduler, SchedulerPolicy
from gpuvirt.hardware.programs import vgpuscheduler
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.moduleoption import FILE
from gpuvirt.model.change.vgpus.scheduling import refuse, registry_scheduler, registry_value
from gpuvirt.paths import HostRoots
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.agent.vgpu.hostwithvgpus import VgpuHost
from tests.cli.commandline import called

T4, OTHER = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
EQUAL_4, FIXED = Scheduler(SchedulerPolicy.EQUAL_SHARE, 4), Scheduler(SchedulerPolicy.FIXED_SHARE)


class Place:
    """A simulated host with four T4, and a folder for its modprobe files."""

    def __init__(self, folder: Path, simulated: str = "4xT4") -> None:
        self.vgpu_host = VgpuHost(simulated, folder)
        self.here = commandhost.Host(self.vgpu_host.change_host, self.vgpu_host.given, {}, {}, {}, folder)
        self.roots = HostRoots.under(folder / "host")
        self.roots.local(FILE).parent.mkdir(parents=True)

    def set(self, gpu: str, desired: Scheduler, *, persist: bool = False, dry_run: bool = False) -> int:
        """Return the exit code of the command."""
        try:
            order = SchedulerOrder(desired, persist=persist, dry_run=dry_run)
            set_scheduler(self.here, self.roots, gpu, order, output=Output.JSON)
        except typer.Exit as end:
            return end.exit_code
        return 0

    def has(self, gpu: PciAddress) -> Scheduler:
        found = vgpuscheduler.read_scheduler(self.vgpu_host.tools, gpu)
        assert isinstance(found, Scheduler)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


Printed = pytest.CaptureFixture[str]


def test_the_scheduler_is_set_once_and_shown(place: Place, capsys: Printed) -> None:
    assert place.set(T4, EQUAL_4) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [f"{T4}: set the vGPU scheduler to equal-share, 4 ms"]
    assert (place.has(T4), place.has(OTHER).policy) == (EQUAL_4, SchedulerPolicy.BEST_EFFORT)
    assert place.set(T4, EQUAL_4) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == []
    show_schedulers(place.here, place.roots, [T4, OTHER], ListFormat(ListOutput.TABLE))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [[T4, "equal-share", "4", "ms", "-"], [OTHER, "best-effort", "-", "-"]]


def test_setting_the_scheduler_keeps_the_vgpus(place: Place) -> None:
    place.vgpu_host.desired_vgpus(T4, DesiredVgpus({"T4-4Q": 3}))
    before = place.vgpu_host.types(T4)
    assert place.set(T4, EQUAL_4) == 0
    assert place.vgpu_host.types(T4) == before


def test_a_dry_run_of_the_scheduler_changes_nothing(place: Place, capsys: Printed) -> None:
    assert place.set(T4, EQUAL_4, persist=True, dry_run=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (len(printed["steps"]), printed["persisted"]) == (1, True)
    assert place.has(T4).policy is SchedulerPolicy.BEST_EFFORT
    assert not place.roots.local(FILE).exists()


def test_a_persistent_scheduler_is_written_to_the_modprobe_file(place: Place, capsys: Printed) -> None:
    assert place.set(T4, EQUAL_4, persist=True) == 0
    assert place.set(OTHER, FIXED, persist=True) == 0
    assert "pci=0000:3b:00.0;RmPVMRL=0x00040003" in place.roots.local(FILE).read_text()
    assert kept_schedulers(place.roots) == {T4: EQUAL_4, OTHER: FIXED}
    capsys.readouterr()
    show_schedulers(place.here, place.roots, [], ListFormat(ListOutput.JSON))
    rows = {row["gpu"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 4
    assert rows[T4]["scheduler"] == rows[T4]["kept"] == {"policy": "equal-share", "timeslice-ms": 4}
    assert rows[OTHER]["kept"] == {"policy": "fixed-share", "timeslice-ms": None}


def test_running_vms_block_setting_the_scheduler_but_not_persisting_it(place: Place, capsys: Printed) -> None:
    place.vgpu_host.desired_vgpus(T4, DesiredVgpus({"T4-8Q": 2}))
    vm = place.vgpu_host.kernel.start_vm(place.vgpu_host.group_of(min(place.vgpu_host.types(T4))))
    assert place.set(T4, EQUAL_4, persist=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [reason["code"] for reason in printed["reasons"]] == ["VgpuInUse"]
    assert f"(pid {vm.pid})" in printed["reasons"][0]["message"]
    assert printed["persisted"]
    assert place.has(T4).policy is SchedulerPolicy.BEST_EFFORT
    assert kept_schedulers(place.roots) == {T4: EQUAL_4}


def test_a_vm_that_starts_after_the_plan_fails_the_command(place: Place, capsys: Printed) -> None:
    host = place.vgpu_host
    host.desired_vgpus(T4, DesiredVgpus({"T4-8Q": 2}))
    group = host.group_of(min(host.types(T4)))

    def start_vm(command: Sequence[str]) -> None:
        if "set-scheduler-state" in command:
            host.kernel.start_vm(group)

    host.tools.before = start_vm
    assert place.set(T4, EQUAL_4) == 1
    assert [reason["code"] for reason in json.loads(capsys.readouterr().out)["reasons"]] == ["InUse"]
    assert place.has(T4).policy is SchedulerPolicy.BEST_EFFORT


def test_gpus_of_other_vendors_are_not_shown(tmp_path: Path, capsys: Printed) -> None:
    place = Place(tmp_path, "2xFlex170")
    show_schedulers(place.here, place.roots, [], ListFormat(ListOutput.JSON))
    assert json.loads(capsys.readouterr().out) == []


def test_a_modprobe_file_of_another_program_is_left_alone(place: Place, capsys: Printed) -> None:
    file = place.roots.local(FILE)
    file.write_text("options nvidia NVreg_EnableMSI=1\n")
    assert place.set(T4, EQUAL_4, persist=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert ([reason["code"] for reason in printed["reasons"]], printed["persisted"]) == (["StepFailed"], False)
    assert file.read_text() == "options nvidia NVreg_EnableMSI=1\n"


@pytest.mark.parametrize(
    ("simulated", "gpu", "desired", "code"),
    [
        ("2xA30", "0000:17:00.0", EQUAL_4, "SchedulerUnfit"),
        ("2xA10-vgpu", "0000:4b:00.0", FIXED, "SchedulerUnfit"),
        ("2xA10-vgpu", "0000:b1:00.0", FIXED, "NoVgpuHost"),
        ("4xT4", T4, Scheduler(SchedulerPolicy.BEST_EFFORT, 4), "SchedulerUnfit"),
        ("2xFlex170", "0000:4d:00.0", EQUAL_4, "SchedulerUnfit"),
    ],
)
def test_an_unsupported_scheduler_is_refused_and_not_persisted(
    simulated: str, gpu: str, desired: Scheduler, code: str, tmp_path: Path, capsys: Printed
) -> None:
    place = Place(tmp_path, simulated)
    assert place.set(gpu, desired, persist=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert ([reason["code"] for reason in printed["reasons"]], printed["persisted"]) == ([code], False)
    assert not place.roots.local(FILE).exists()


def test_a_host_without_nvidia_smi_is_reported(tmp_path: Path) -> None:
    export(build_host(load_host("4xT4")), tmp_path / "host")
    shown = called("vgpu", "scheduler", "get", "--host-root", "host", cwd=tmp_path)
    assert shown.returncode == 1
    assert b"no nvidia-smi in" in shown.stdout
    done = called("vgpu", "scheduler", "set", T4, "equal-share", "--persist", "--host-root", "host", cwd=tmp_path)
    assert (done.returncode, b"Unread" in done.stdout) == (1, True)
    assert not (tmp_path / "host" / FILE.lstrip("/")).exists()
    assert called("vgpu", "scheduler", "set", T4, "lottery", "--host-root", "host", cwd=tmp_path).returncode == 2


@given(st.sampled_from(SchedulerPolicy), st.none() | st.integers(1, 30))
def test_the_registry_value_encodes_the_scheduler(policy: SchedulerPolicy, timeslice_ms: int | None) -> None:
    desired = Scheduler(policy, timeslice_ms)
    if not refuse(GpuModes(T4), desired):
        assert registry_scheduler(registry_value(desired)) == desired


def test_foreign_registry_values_are_no_scheduler() -> None:
    assert registry_scheduler(0xAAFFF001) is None
