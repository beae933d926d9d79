"""`gpuvirt vgpu`: its exit codes, and the GPUs and vGPUs that its arguments name."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gatefiles import boot_id
from gpuvirt.agent.change.gate.gaterecord import GateRecord, GateState
from gpuvirt.agent.change.observation import observe
from gpuvirt.agent.known import snapshot
from gpuvirt.cli.changes.vgpuchanges import would
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import IommuGroup, PciAddress, slot_of
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredGpu, DesiredVgpus
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import AgentView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec, load_host, shared_cards
from tests.agent.change.changes import inputs
from tests.agent.change.hostunit import A10, L40S, HostUnit
from tests.agent.node.simnode import IDS
from tests.cli.commandline import ran

GPU, FREE, CARRYING = PciAddress("0000:3b:00.0"), PciAddress("0000:86:00.0"), PciAddress("0000:4b:00.0")
CONFIGS = """version: v1
vgpu-configs:
  present: [{devices: [0], vgpu-devices: {T4-8Q: 2}}]
  other: [{devices: [0], vgpu-devices: {T4-4Q: 4}}]
"""


class Place:
    """The files of a host with four T4, of which the first carries two vGPUs."""

    def __init__(self, folder: Path) -> None:
        kernel = build_host(load_host("4xT4"))
        self.vgpu = min(vgpu.id for vgpu in scan(kernel).vgpu_hosts[GPU].live)
        export(kernel, folder / "host")
        self.host, self.configs = folder / "host", folder / "configs.yaml"
        self.configs.write_text(CONFIGS)

    def run(self, *arguments: str) -> "CompletedProcess[str]":
        return ran("vgpu", *arguments, "--host-root", str(self.host))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(("config", "code"), [("present", 0), ("other", 1)])
def test_assert_fails_where_vgpus_differ(place: Place, config: str, code: int) -> None:
    done = place.run("assert", "-f", str(place.configs), "-c", config)
    assert (done.returncode, f"would: {GPU}: remove" in done.stdout) == (code, bool(code)), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("create", GPU, "T4-8Q", "--dry-run"), 1, "NoRoom"),
        (("create", FREE, "T4-8Q", "--dry-run"), 0, f"would: {FREE}: create GRID T4-8Q"),
        (("create", "0000:86:00.1", "T4-8Q"), 2, "0000:86:00.1 is no GPU of this host"),
        (("types", "0000:86:00.1"), 2, "0000:86:00.1 is no GPU of this host"),
        (("delete", GPU), 2, f"{GPU}: this host has no such vGPU"),
        (("create", GPU, "T4-8Q", "--dry-run"), 1, f"{GPU} has no room for 1 more GRID T4-8Q: 2 exist and 2 fit"),
        (("create", GPU, "T4-8Q", "--dry-run"), 1, "fix:  remove one first: gpuvirt vgpu delete VGPU"),
        (("create", FREE, "T4-8Q", "-n", "3"), 1, f"{FREE} has no room for 3 more GRID T4-8Q: 0 exist and 2 fit"),
        (("create", FREE, "T4-8Q", "-n", "3"), 1, "fix:  create 2 or fewer"),
    ],
)
def test_a_command_that_changes_nothing_says_why(
    place: Place, arguments: tuple[str, ...], code: int, text: str
) -> None:
    done = place.run(*arguments)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_a_dry_run_names_the_process_that_the_change_would_meet(tmp_path: Path) -> None:
    unit, target = HostUnit("2xA10-vgpu", A10, tmp_path), DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 2}))
    process = unit.kernel.open_native(A10)
    (reason,) = would(observe(unit.change_host, inputs()), A10, target).reasons
    assert reason.text.startswith(f"{ReasonCode.IN_USE}: {A10} is in use by python3 (pid {process.pid})")
    assert (unit.apply(target).reasons, unit.taken) == ((reason,), [])


def test_only_a_dry_run_opens_vgpus_to_find_processes_that_are_not_shown(tmp_path: Path) -> None:
    unit, target = HostUnit("2xA10-vgpu", CARRYING, tmp_path), DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 1}))
    unit.kernel.vfio.open(IommuGroup(200), 4711)
    seen = observe(unit.change_host, inputs())
    assert would(seen, CARRYING, target).reasons == ()
    (reason,) = would(seen, CARRYING, target, opens=True).reasons
    assert (reason.code, "/dev/vfio/200 is open" in reason.text) == (ReasonCode.VGPU_IN_USE, True)


def test_nothing_is_opened_while_a_change_may_be_under_way(tmp_path: Path) -> None:
    """The change leases the groups itself, and a gate that can't be read does not tell."""
    unit, target = HostUnit("2xA10-vgpu", CARRYING, tmp_path), DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 1}))
    unit.kernel.vfio.open(IommuGroup(200), 4711)
    seen, gate = observe(unit.change_host, inputs()), unit.change_host.gates.host
    slot = slot_of(CARRYING)
    gate.folder.mkdir(parents=True, exist_ok=True)
    gate.write(slot, GateRecord(boot_id(), state=GateState.BLOCKED))
    assert would(seen, CARRYING, target, opens=True).reasons == ()
    gate.path_of(slot, "json").unlink()
    gate.path_of(slot, "json").mkdir()
    assert would(seen, CARRYING, target, opens=True).reasons == ()


def test_a_vgpu_stays_while_its_allocation_is_unknown(place: Place) -> None:
    (place.host / "var/lib/gpuvirt").mkdir(parents=True)
    (place.host / "var/lib/gpuvirt/ledger.json").write_bytes(b"torn")
    done = place.run("delete", place.vgpu)
    assert (done.returncode, "AllocationsUnknown" in done.stdout) == (1, True), done.stdout


@pytest.mark.parametrize(
    ("published", "arguments", "text"),
    [
        ({"desired": "vgpu", "vgpu_config": "T4-8Q"}, ("apply", "-c", "T4-4Q"), "has the vGPU config T4-8Q"),
        ({"desired": "passthrough"}, ("apply", "-c", "T4-4Q", "--rebind"), "is kept in mode passthrough"),
    ],
)
def test_a_dry_run_has_the_refusal_of_vgpus_that_an_agent_manages(
    place: Place, published: dict[str, str], arguments: tuple[str, ...], text: str
) -> None:
    seen = snapshot.take(build_host(load_host("4xT4")), Settings(), IDS, RealClock())
    agent = AgentView(version="test", pid=1, started=seen.at, plugin_only=False)
    view = replace(seen, agent=agent, gpus=tuple(replace(gpu, **published) for gpu in seen.gpus))
    (place.host / "run/gpuvirt").mkdir(parents=True)
    (place.host / "run/gpuvirt/node.json").write_bytes(msgspec.json.encode(view))
    done = place.run(*arguments, "--dry-run")
    assert (done.returncode, f"{GPU}: " in done.stdout) == (1, False), done.stdout
    assert f"ManagedByAgent: {GPU} {text} by this node's agent" in done.stdout
    where = ("node NODE --overwrite nvidia.com/", "in the agent's settings")
    assert all(source in done.stdout for source in where), "the view does not say where it is from"


def test_a_gpu_without_vgpus_says_that_a_label_is_for_all_gpus_of_the_node(place: Place) -> None:
    text = " ".join(ran("devices", "--host-root", str(place.host)).stdout.split())
    assert "with an agent, for all GPUs of the node and in place of their unused vGPUs: kubectl label" in text


def test_only_the_types_of_named_gpus_are_listed(place: Place) -> None:
    rows = json.loads(place.run("types", GPU, "-o", "json").stdout)
    assert {row["gpu"] for row in rows} == {GPU}


def test_no_vgpu_is_created_beside_vgpus_of_unknown_types(tmp_path: Path) -> None:
    """No type fits on a full GPU, so that the host names none, and this one has no nvidia-smi to ask."""
    card = replace(shared_cards()["L40S"], total_vfs=4)
    host = HostSpec(about="an L40S", boards={"L40S": card}, slots=(SlotSpec(at=L40S, board="L40S", group=12, numa=0),))
    unit = HostUnit(host, L40S, tmp_path)
    unit.fill(L40S_24Q=2)
    export(unit.kernel, tmp_path / "host")
    done = ran("vgpu", "create", L40S, "L40S-24Q", "--host-root", str(tmp_path / "host"))
    assert (done.returncode, "Unread" in done.stdout) == (1, True), done.stderr


def test_types_of_vfs_have_names_of_their_own(tmp_path: Path) -> None:
    export(build_host(load_host("2xFlex170")), tmp_path)
    gpu = "0000:b3:00.0"

    def vgpu(*arguments: str) -> str:
        return ran("vgpu", *arguments, "--host-root", str(tmp_path)).stdout

    rows = json.loads(vgpu("types", gpu, "-o", "json"))
    assert [row["name"] for row in rows] == [row["type"] for row in rows]
    assert len({row["name"] for row in rows}) == 31
    assert "VFs  -" in " ".join(vgpu("types", gpu).split(" ")), "vGPU configs can't have these types"
    assert vgpu("create", gpu, "4 VFs", "--dry-run") == (
        f"would: {gpu}: create 4 VFs {gpu}\nwould: {gpu}: bind its VFs to a VFIO driver, for VMs\n"
        f"{gpu}: would then carry 4 VFs\n"
    )
    for count in (2, 4):
        refused = vgpu("create", "0000:4d:00.0", f"{count} VFs", "--dry-run")
        assert "NoRoom" in refused, "all VFs are switched on at once"
        assert "fix:  when no VM uses a VF: gpuvirt vgpu delete 0000:4d:00.0" in refused
    assert "NoSuchType" in (unknown := vgpu("create", gpu, "32 VFs", "--dry-run"))
    assert "4 VFs" in unknown, "the types are named whole"
