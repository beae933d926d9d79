"""The free room of a GPU in mode `on-demand`, and the listed ids: pure functions of facts and allocations."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuModes, LiveVgpu, SmiReport
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.ledger import Entry, Stage
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.steps import RemoveVgpu, SetMixedSizes
from gpuvirt.model.change.vgpus import vgpuplanning
from gpuvirt.model.change.vgpus.gpustate import NAMESPACE, GpuState, gpu_state_of
from gpuvirt.model.desired.settings import OnDemandSettings, Settings
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.ondemand.offer import (
    Carried,
    OnDemandInputs,
    OnDemandOffer,
    carried_by,
    gpus_on_demand,
    offer_on_demand,
    room,
)
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.node.simnode import IDS
from tests.agent.ondemand.pods import GPU, NO_TIME, V8Q, one_p100

ODD = Unread(HostPath("/sys/bus/mdev/devices"), errno=5)
Q1, Q8 = VgpuType("GRID P100-1Q"), VgpuType("GRID P100-8Q")


def host() -> tuple[Inventory, GpuState]:
    inventory = build_inventory(scan(one_p100()))
    state = gpu_state_of(inventory, GPU, (), NAMESPACE)
    assert state is not None
    return inventory, state


def with_live(state: GpuState, *types: VgpuType | Unread) -> GpuState:
    live = tuple(LiveVgpu(VgpuId(f"vgpu-{index}"), kind, GPU, None) for index, kind in enumerate(types))
    return replace(state, host=replace(state.host, live=live))


def inputs(state: GpuState | None, *entries: Entry) -> OnDemandInputs:
    return OnDemandInputs({GPU: state}, Settings().on_demand, Naming(IDS), entries, "0000abcd")


def entry(number: int, stage: Stage = Stage.CREATED, resource: ResourceName = V8Q) -> Entry:
    target = Target(GPU, VgpuId(f"vgpu-{number}"), Q8)
    return Entry(resource, DeviceId(f"v0000abcd-{number}"), target, None, "allocate:x:1", NO_TIME, stage=stage)


@pytest.mark.parametrize(
    "blind",
    [
        with_live(host()[1], ODD),
        replace(host()[1], host=replace(host()[1].host, unread=(ODD,))),
    ],
)
def test_a_gpu_that_cannot_be_read_is_offered_for_nothing(blind: GpuState) -> None:
    inventory, _ = host()
    gpu = gpus_on_demand(inventory, inputs(blind))[GPU]
    assert gpu.withheld is not None
    assert (gpu.withheld.code, gpu.room) == (ReasonCode.UNREAD, {})
    assert vgpuplanning.plan(blind, DesiredVgpus(on_demand=True)).refusals[0].code is ReasonCode.UNREAD


def test_a_size_mode_that_the_gpu_lacks_is_refused_before_any_removal() -> None:
    _, state = host()
    report = SmiReport(GpuModes(GPU, mixed_sizes=False, can_mix_sizes=False))
    found = vgpuplanning.plan(
        replace(with_live(state, Q1), smi=report), DesiredVgpus(sizes=Sizes.MIXED, on_demand=True)
    )
    assert (found.steps, [reason.code for reason in found.refusals]) == ((), [ReasonCode.MODE_UNSUPPORTED])


def test_sizes_are_mixed_once_the_gpu_is_empty() -> None:
    _, state = host()
    able = replace(with_live(state, Q1), smi=SmiReport(GpuModes(GPU, mixed_sizes=False, can_mix_sizes=True)))
    desired = DesiredVgpus(sizes=Sizes.MIXED, on_demand=True)
    assert [type(step) for step in vgpuplanning.plan(able, desired).steps] == [RemoveVgpu, SetMixedSizes]
    vgpu = VgpuId("vgpu-0")
    used = replace(able, users={vgpu: ("pod default/a",)}, allocated=frozenset({vgpu}))
    found = vgpuplanning.plan(used, desired)
    assert (found.steps, len(found.pending)) == ((), 1)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"changing": Scope(frozenset({GPU}))}, ReasonCode.UNIT_BUSY),
        ({"blocked": {GPU: "unbind"}}, ReasonCode.WRITE_BLOCKED),
    ],
)
def test_a_gpu_that_is_changed_gets_no_vgpu(changed: dict[str, object], code: ReasonCode) -> None:
    inventory, state = host()
    gpu = gpus_on_demand(inventory, replace(inputs(state), **changed))[GPU]
    assert gpu.withheld is not None
    assert (gpu.withheld.code, gpu.room) == (code, {})


def test_a_gpu_on_a_vfio_driver_and_one_that_fell_off_the_bus_get_no_vgpu() -> None:
    inventory, state = host()
    for driver, fallen, code in (
        ("vfio-pci", False, ReasonCode.NO_VGPU_HOST),
        ("nvidia", True, ReasonCode.FELL_OFF_BUS),
    ):
        function = replace(inventory.facts.functions[GPU], driver=driver, fell_off_bus=fallen)
        facts = replace(inventory.facts, functions={**inventory.facts.functions, GPU: function})
        gpu = gpus_on_demand(replace(inventory, facts=facts), inputs(state))[GPU]
        assert gpu.withheld is not None
        assert gpu.withheld.code is code
    unhosted = gpus_on_demand(inventory, inputs(None))[GPU]
    assert unhosted.withheld is not None
    assert unhosted.withheld.code is ReasonCode.NO_VGPU_HOST


def test_a_vgpu_that_is_being_created_or_removed_takes_its_place() -> None:
    _, state = host()
    carried = carried_by(state, [Q8])
    assert isinstance(carried, Carried)
    assert room(state, carried) == {**dict.fromkeys(room(state, carried), 0), Q8: 1}
    leaving = carried_by(replace(state, leaving={VgpuId("x"): Q8}))
    assert isinstance(leaving, Carried)
    assert room(state, leaving)[Q8] == 1
    assert room(state, leaving)[Q1] == 0


def test_an_id_of_a_pod_that_ends_is_not_listed_and_its_place_is_not_counted() -> None:
    inventory, state = host()
    held, ending = entry(0), frozenset({DeviceId("v0000abcd-0")})
    carrying = with_live(state, Q8)
    listed = offer_on_demand(inventory, inputs(carrying, held), OnDemandOffer())
    assert len(listed.listed(V8Q)) == 2
    ended = offer_on_demand(inventory, replace(inputs(carrying, held), ending=ending), listed)
    assert len(ended.listed(V8Q)) == 1
    assert not ending & set(ended.listed(V8Q))


@given(st.lists(st.sampled_from([(), (Q8,), (Q8, Q8), (Q1,), (Q1, Q1, Q1)]), max_size=12))
def test_a_number_is_listed_once_and_counts_are_what_fits(history: list[tuple[VgpuType, ...]]) -> None:
    inventory, state = host()
    offer, gone = OnDemandOffer(), set[DeviceId]()
    before: set[DeviceId] = set()
    for types in history:
        offer = offer_on_demand(inventory, inputs(with_live(state, *types)), offer)
        again = offer_on_demand(inventory, inputs(with_live(state, *types)), offer)
        assert again == offer  # deciding twice is deciding once
        now = {device for resource in offer.names for device in offer.listed(resource)}
        assert all(map(is_on_demand_id, now))
        assert not now & gone  # an id that was withdrawn never returns
        gone |= before - now
        before = now
        free = {offer.types[resource]: len(ids) for resource, ids in offer.free.items()}
        if not types:
            assert set(free.values()) == {1}
        else:
            most = {Q8: 2, Q1: 16}[types[0]]
            assert free[types[0]] == most - len(types)
            assert sum(free.values()) - free[types[0]] in {0, most - len(types)}  # another series of that size


def test_settings_that_offer_other_types_are_followed() -> None:
    inventory, state = host()
    chosen = replace(inputs(state), settings=OnDemandSettings(types=("P100-8Q",)))
    assert offer_on_demand(inventory, chosen, OnDemandOffer()).names == {V8Q}
    assert Counter(gpus_on_demand(inventory, chosen)[GPU].room) == Counter({Q8: 2})
