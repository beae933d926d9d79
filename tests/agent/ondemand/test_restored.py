"""The order and the places in which the vGPUs of pods are made again after a reboot: plans from the ledger."""

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework, VgpuHost
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.ledger import Entry, locate
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus import vgpuplanning
from gpuvirt.model.change.vgpus.gpustate import NAMESPACE, GpuState, gpu_state_of, holdings_of
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import build_inventory
from tests.agent.ondemand.pods import GPU, NO_TIME, V8Q, one_p100

P100_4Q = VgpuType("GRID P100-4Q")
GROUPS = {"a": 201, "b": None, "c": 200, "d": 1000}


def entry(letter: str, group: int | None) -> Entry:
    """Return the allocation of a vGPU whose UUID begins with a letter."""
    target = Target(GPU, VgpuId(f"{letter}0000000-0000-4000-8000-000000000001"), P100_4Q)
    known = IommuGroup(group) if group is not None else None
    return Entry(V8Q, DeviceId(f"v0000abcd-{ord(letter)}"), target, known, "allocate:x:1", NO_TIME)


def test_lost_vgpus_are_made_again_in_the_order_of_their_recorded_groups() -> None:
    """After a second reboot, too; those whose groups are unknown come last."""
    entries = tuple(entry(letter, group) for letter, group in GROUPS.items())
    for _ in range(2):
        entries = locate(entries, {}, same_boot=False)
    holdings = holdings_of(entries, same_boot=True)
    state = gpu_state_of(build_inventory(scan(one_p100())), GPU, holdings, NAMESPACE)
    assert state is not None
    steps = vgpuplanning.plan(state, DesiredVgpus(on_demand=True)).steps
    assert [step.vgpu[0] for step in steps if isinstance(step, CreateVgpu)] == ["c", "a", "d", "b"]


def test_groups_of_this_boot_are_not_recorded_ones() -> None:
    before = (entry("a", 201),)
    assert locate(before, {}, same_boot=True) == before


def test_a_vgpu_whose_vf_is_gone_takes_the_place_of_no_other() -> None:
    gone, existing = PciAddress("0000:3b:00.4"), PciAddress("0000:3b:00.5")
    free = VgpuHost(GPU, Framework.VENDOR_VFIO, {existing: {P100_4Q: 1}})
    lost = dict.fromkeys((VgpuId(gone), VgpuId(existing)), P100_4Q)
    steps = vgpuplanning.plan(GpuState(free, remembered=lost, lost=lost), DesiredVgpus(on_demand=True)).steps
    assert steps == (CreateVgpu(VgpuId(existing), P100_4Q, existing),)
