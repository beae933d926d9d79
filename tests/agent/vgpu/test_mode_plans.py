"""Plans for GPUs whose vGPUs depend on mode, GPU instances and placements converge without harm."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.facts.ids import VgpuId, VgpuType, parse_pci_id
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import (
    GpuInstance,
    GpuModes,
    LiveVgpu,
    SmiReport,
)
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import (
    CreateInstance,
    CreateVgpu,
    DestroyInstance,
    RemoveVgpu,
    SetMigMode,
    SetMixedSizes,
    SetScheduler,
    VgpuStep,
)
from gpuvirt.model.change.vgpus import modes
from gpuvirt.model.change.vgpus.gpustate import GpuState, is_mig, size_of
from gpuvirt.model.change.vgpus.instances import starts
from gpuvirt.model.change.vgpus.vgpuplanning import plan_vgpus
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.vgputypes import catalog
from tests.agent.vgpu.modegpu import (
    A30,
    BEST,
    EQUAL,
    GPU,
    MOST,
    NAMES,
    ODD,
    ONE_ON_EACH_HALF,
    TYPES,
    VFS,
    gpu_state,
    in_mig_mode,
    named,
    planned,
)

A30_PLACES = {"1g.6gb": (1, (0, 1, 2, 3)), "2g.12gb": (2, (0, 2)), "4g.24gb": (4, (0,))}
"""How many memory slices each takes, and where it may begin, as `nvidia-smi mig -lgipp` has it."""

SPEC_FIELDS = [
    DesiredVgpus(),
    DesiredVgpus({"A30-12C": 2}, Sizes.EQUAL, EQUAL),
    DesiredVgpus({"A30-4C": 6}, Sizes.EQUAL),
    DesiredVgpus({"A30-4C": 1}),
    DesiredVgpus({"A30-12C": 1, "A30-4C": 1, "A30-8C": 1}, Sizes.MIXED),
    DesiredVgpus({"A30-4C": 4}, Sizes.MIXED, EQUAL),
    DesiredVgpus({"A30-1-6C": 4}),
    DesiredVgpus({"A30-1-6C": 1}),
    DesiredVgpus({"A30-1-6C": 2}),
    DesiredVgpus({"A30-2-12C": 1, "A30-1-6C": 1}),
    DesiredVgpus({"A30-1-6C": 2, "A30-2-12C": 1}),
    DesiredVgpus({"A30-1-6CME": 1, "A30-1-6C": 3}),
    DesiredVgpus({"A30-2-12C": 2}),
    DesiredVgpus({"A30-4-24C": 1}),
]


class Gpu:
    """An A30 that executes plans, and fails where a real GPU would fail."""

    def __init__(self, one: GpuState) -> None:
        assert one.smi is not None
        assert not isinstance(one.smi.modes.gpu_instances, Unread)
        self.board = one
        self.modes = one.smi.modes
        self.scheduler = one.smi.scheduler
        self.live = {vgpu.id: vgpu for vgpu in one.host.live}
        self.instances = {instance.id: instance for instance in one.smi.modes.gpu_instances}

    @property
    def types(self) -> Counter[VgpuType]:
        return Counter(vgpu.type for vgpu in self.live.values() if not isinstance(vgpu.type, Unread))

    def take(self, step: VgpuStep) -> None:
        match step:
            case RemoveVgpu(vgpu, _, slot):
                assert vgpu not in self.board.users, "the vGPU is in use"
                assert self.live.pop(vgpu).parent == slot
            case SetMigMode(_, on):
                assert not self.live
                assert not self.instances
                self.modes = replace(self.modes, mig=on, mig_pending=on, mixed_sizes=None if on else False)
                self.scheduler = BEST
            case SetMixedSizes(_, on):
                assert not self.live
                assert self.modes.mig is False
                self.modes = replace(self.modes, mixed_sizes=on)
            case DestroyInstance(_, instance, profile):
                assert self.instances.pop(instance).profile == profile
                self.each_has_its_instance()
            case CreateInstance(_, profile, start):
                assert self.modes.mig
                size, places = A30_PLACES[profile.partition("+")[0]]
                assert start in places
                for other in self.instances.values():
                    assert start + size <= other.start or other.start + other.size <= start, "the GPU instances overlap"
                number = max(self.instances, default=0) + 1
                self.instances[number] = GpuInstance(number, profile, 0, start, size)
            case CreateVgpu(vgpu, vgpu_type, slot):
                assert vgpu not in self.live
                assert slot not in {vgpu.parent for vgpu in self.live.values()}
                self.live[vgpu] = LiveVgpu(vgpu, vgpu_type, slot, None)
                self.expect_room()
            case SetScheduler(_, scheduler):
                assert not self.board.running
                assert not self.modes.mig
                self.scheduler = scheduler
            case _:
                raise AssertionError(step)

    def expect_room(self) -> None:
        if self.modes.mig:
            self.each_has_its_instance()
        elif self.modes.mixed_sizes:
            assert modes.fits(A30, self.types)
        else:
            assert len({size_of(vgpu_type) for vgpu_type in self.types}) == 1
            assert self.types.total() <= max(MOST[vgpu_type] for vgpu_type in self.types)
            assert not any(is_mig(vgpu_type) for vgpu_type in self.types)

    def each_has_its_instance(self) -> None:
        needed: Counter[str] = Counter()
        for vgpu_type, number in self.types.items():
            instance = next(known.gpu_instance for known in A30.types() if NAMES[known.profile.text] == vgpu_type)
            assert instance is not None
            needed[instance.profile] += number
        assert needed <= Counter(instance.profile for instance in self.instances.values())

    @property
    def after(self) -> GpuState:
        modes = replace(self.modes, gpu_instances=tuple(self.instances.values()))
        host = replace(self.board.host, live=tuple(self.live.values()))
        return replace(self.board, host=host, smi=SmiReport(modes, TYPES, self.scheduler))


def after(one: GpuState, plan: VgpuPlan) -> GpuState:
    gpu = Gpu(one)
    for step in plan.steps:
        gpu.take(step)
    return gpu.after


def carried(one: GpuState) -> Counter[str]:
    return Counter(str(vgpu.type) for vgpu in one.host.live)


def used(one: GpuState, *ids: VgpuId) -> GpuState:
    """Return the GPU state with VMs on some of its vGPUs."""
    return replace(one, users=dict.fromkeys(ids, ("pod default/vm-a",)), running=frozenset(ids))


@settings(deadline=None)
@given(st.lists(st.sampled_from(SPEC_FIELDS), min_size=1, max_size=5), st.data())
def test_every_plan_reaches_the_desired_state_and_keeps_vgpus_in_use(
    desired_by_gpu: list[DesiredVgpus], data: st.DataObject
) -> None:
    one = gpu_state()
    for desired_vgpus in desired_by_gpu:
        ids = [vgpu.id for vgpu in one.host.live]
        one = used(one, *data.draw(st.sets(st.sampled_from(ids)) if ids else st.just(set())))
        plan = planned(one, desired_vgpus)
        assert plan.refusals == ()
        one = after(one, plan)  # asserts that no step touches a vGPU in use, and that each step is possible
        again = planned(one, desired_vgpus)
        assert again.steps == (), "after a plan the next plan is empty"
        assert {reason.code for reason in again.pending} <= {ReasonCode.VGPU_IN_USE}
        one = after(used(one), planned(used(one), desired_vgpus))
        assert carried(one) == named(desired_vgpus), "when all vGPUs are free"
        assert planned(one, desired_vgpus).met


@settings(deadline=None)
@given(st.sampled_from(SPEC_FIELDS), st.sampled_from(SPEC_FIELDS))
def test_vgpus_of_both_desired_states_keep_their_ids_through_every_mode_switch(
    first: DesiredVgpus, second: DesiredVgpus
) -> None:
    before = after(gpu_state(), planned(gpu_state(), first))
    existing = after(before, planned(before, second))
    common = {(vgpu.id, vgpu.type) for vgpu in before.host.live} & {(vgpu.id, vgpu.type) for vgpu in existing.host.live}
    assert Counter(vgpu_type for _, vgpu_type in common) == Counter(named(first)) & Counter(named(second))


@pytest.mark.parametrize("desired_vgpus", [field for field in SPEC_FIELDS if field.types])
def test_a_vgpu_in_use_blocks_every_mode_switch(desired_vgpus: DesiredVgpus) -> None:
    for first in SPEC_FIELDS:
        existing = after(gpu_state(), planned(gpu_state(), first))
        busy = used(existing, *(vgpu.id for vgpu in existing.host.live[:1]))
        plan = planned(busy, desired_vgpus)
        if any(isinstance(step, SetMigMode | SetMixedSizes) for step in plan.steps):
            assert not busy.host.live
        elif plan.pending:
            assert "pod default/vm-a" in plan.pending[0].text


@pytest.mark.parametrize("field", ["mixed_sizes", "can_mix_sizes", "mig", "mig_pending", "gpu_instances"])
@pytest.mark.parametrize("desired_vgpus", [field for field in SPEC_FIELDS if field.types])
def test_an_unread_mode_changes_nothing(desired_vgpus: DesiredVgpus, field: str) -> None:
    one = gpu_state()
    assert one.smi is not None
    answers = {
        "mixed_sizes": replace(one.smi.modes, mixed_sizes=ODD),
        "can_mix_sizes": replace(one.smi.modes, can_mix_sizes=ODD),
        "mig": replace(one.smi.modes, mig=ODD),
        "mig_pending": replace(one.smi.modes, mig_pending=ODD),
        "gpu_instances": replace(one.smi.modes, gpu_instances=ODD),
    }
    blind = replace(one, smi=replace(one.smi, modes=answers[field]))
    plan = planned(blind, desired_vgpus)
    irrelevant = field == "can_mix_sizes" or (field == "mixed_sizes" and desired_vgpus.sizes is None)
    assert bool(plan.refusals) is not irrelevant
    assert bool(plan.steps) is irrelevant


def test_gpu_instances_of_unknown_cards_are_kept() -> None:
    mig = GpuModes(GPU, mig=True, mig_pending=True, gpu_instances=(GpuInstance(1, "1g.6gb", 14, 0, 1),))
    one = replace(gpu_state(), card=None, smi=SmiReport(mig, TYPES))
    desired_vgpus = DesiredVgpus({"A30-1-6C": 1})
    assert [reason.code for reason in planned(one, desired_vgpus).refusals] == [ReasonCode.NO_ROOM]
    offering = replace(one, host=replace(one.host, creatable={VFS[0]: {NAMES["A30-1-6C"]: 1}}))
    assert [type(step) for step in planned(offering, desired_vgpus).steps] == [CreateVgpu]


def test_a_scheduler_that_could_not_be_parsed_is_read_again() -> None:
    one = gpu_state()
    assert one.smi is not None
    blind = replace(one, smi=replace(one.smi, scheduler=ODD))
    desired_vgpus = DesiredVgpus({"A30-4C": 2}, scheduler=EQUAL)
    plan = planned(blind, desired_vgpus)
    assert {type(step) for step in plan.steps} == {CreateVgpu}
    done = planned(replace(blind, host=after(one, plan).host), desired_vgpus)
    assert [reason.code for reason in done.refusals] == [ReasonCode.UNREAD]


def test_a_pod_whose_vm_does_not_run_yet_does_not_keep_the_scheduler() -> None:
    """After a reboot of the host, pods have their vGPUs at once, but the driver has lost its scheduler setting."""
    desired_vgpus = DesiredVgpus({"A30-4C": 2}, scheduler=EQUAL)
    one = after(gpu_state(), planned(gpu_state(), DesiredVgpus({"A30-4C": 2})))
    held = replace(one, users=dict.fromkeys((vgpu.id for vgpu in one.host.live), ("pod default/vm-a",)))
    assert [type(step) for step in planned(held, desired_vgpus).steps] == [SetScheduler]
    runs = used(one, *(vgpu.id for vgpu in one.host.live))
    assert [reason.code for reason in planned(runs, desired_vgpus).pending] == [ReasonCode.VGPU_IN_USE]


# --- placements


@settings(deadline=None)
@given(st.fixed_dictionaries({gb: st.integers(0, 3) for gb in (12, 8, 6, 4, 3)}))
def test_mixed_sizes_fit_exactly_if_their_placements_can_be_laid_out(counts: dict[int, int]) -> None:
    places = {vgpu_type.profile.gb: vgpu_type.placements for vgpu_type in A30.types() if vgpu_type.placements}
    counts = {gb: number for gb, number in counts.items() if gb in places}
    desired = [gb for gb, number in counts.items() for _ in range(number)]
    types = {NAMES[f"A30-{gb}C"]: number for gb, number in counts.items()}
    assert modes.fits(A30, types) is _laid_out(desired, places, 0)


def _laid_out(desired: list[int], places: Mapping[int, tuple[int, ...]], taken: int) -> bool:
    """Try every placement of one vGPU after another."""
    if not desired:
        return True
    span = (1 << desired[0]) - 1
    free = [place for place in places[desired[0]] if not (span << place) & taken]
    return any(_laid_out(desired[1:], places, taken | span << place) for place in free)


def test_cards_without_placements_are_checked_by_counts() -> None:
    (l40s,) = catalog.cards_of(parse_pci_id("10de:26b9"), parse_pci_id("10de:1851"))
    names = {size: VgpuType(f"NVIDIA L40S-{size}Q") for size in (4, 8, 16, 24, 48)}
    assert modes.fits(l40s, {names[16]: 2, names[8]: 2})
    assert not modes.fits(l40s, {names[16]: 3}), "two are documented"
    assert not modes.fits(l40s, {names[24]: 2, names[4]: 1}), "more than its framebuffer"
    assert modes.fits(None, {names[48]: 9}), "the placements are unknown"


@pytest.mark.parametrize("vgpus", [(), ("A30-1-6C",), ("A30-1-6C", "A30-1-6C")])
@pytest.mark.parametrize("small", [1, 2])
def test_idle_gpu_instances_are_destroyed_for_a_larger_one(vgpus: tuple[str, ...], small: int) -> None:
    before = in_mig_mode(*ONE_ON_EACH_HALF, vgpus=vgpus)
    desired_vgpus = DesiredVgpus({"A30-2-12C": 1, "A30-1-6C": small})
    existing = after(before, planned(before, desired_vgpus))
    assert carried(existing) == named(desired_vgpus)
    assert {vgpu.id for vgpu in before.host.live[:small]} <= {vgpu.id for vgpu in existing.host.live}


def test_gpu_instances_stay_while_a_vgpu_of_their_profile_is_in_use() -> None:
    before = used(in_mig_mode(*ONE_ON_EACH_HALF, vgpus=("A30-1-6C", "A30-1-6C")), VgpuId("vgpu-0000:17:00.4"))
    busy = used(before, before.host.live[0].id)
    plan = planned(busy, DesiredVgpus({"A30-2-12C": 1, "A30-1-6C": 2}))
    assert plan.steps == ()
    assert "unknown one of its GPU's 1g.6gb instances" in plan.pending[0].text


def test_gpu_instances_that_exceed_the_memory_slices_are_refused() -> None:
    (a100,) = [card for card in catalog.cards() if card.gpu == "A100DX"]
    names = {vgpu_type.profile.text: VgpuType(f"NVIDIA {vgpu_type.profile.text}") for vgpu_type in a100.types()}
    modes = GpuModes(GPU, mig=True, mig_pending=True)
    types = {str(number): vgpu_type for number, vgpu_type in enumerate(names.values())}
    existing = replace(gpu_state(), card=a100, most={}, smi=SmiReport(modes, types, BEST))
    desired_vgpus = DesiredVgpus({"A100DX-3-40C": 2, "A100DX-1-10C": 1})
    plan = plan_vgpus(existing, {names[name]: number for name, number in desired_vgpus.types.items()}, desired_vgpus)
    assert [reason.code for reason in plan.refusals] == [ReasonCode.NO_ROOM]


@pytest.mark.parametrize("card", [card for card in catalog.cards() if card.is_mig], ids=lambda card: card.product_name)
def test_every_card_has_as_many_placements_as_gpu_instances(card: catalog.Card) -> None:
    for vgpu_type in card.types():
        if vgpu_type.gpu_instance is not None and not vgpu_type.gpu_instance.profile.endswith(
            "+me"
        ):  # a GPU has a single +me instance
            assert len(starts(card, vgpu_type.gpu_instance.profile)) * vgpu_type.gpu_instance.each == vgpu_type.most
