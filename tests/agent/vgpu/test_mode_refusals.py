"""vGPUs that need a mode which the GPU does not have are refused before a step."""

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import plan_vgpus
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import ReasonCode
from tests.agent.vgpu.modegpu import NAMES, ODD, ONE_ON_EACH_HALF, gpu_state, in_mig_mode, planned

MIG_BACKED = DesiredVgpus({"A30-1-6C": 1})
MIXED = DesiredVgpus({"A30-4C": 1, "A30-8C": 1}, Sizes.MIXED)


def without(
    *, mig: bool | None = False, mixed_sizes: bool | Unread | None = False, can_mix: bool | None = True
) -> GpuState:
    state = gpu_state()
    assert state.smi is not None
    modes = replace(state.smi.modes, mig=mig, mig_pending=bool(mig), mixed_sizes=mixed_sizes, can_mix_sizes=can_mix)
    return replace(state, smi=replace(state.smi, modes=modes))


@pytest.mark.parametrize(
    ("state", "desired"),
    [
        (without(mig=None), MIG_BACKED),
        (without(mixed_sizes=None, can_mix=None), MIXED),
        (without(can_mix=False), MIXED),
    ],
)
def test_vgpus_that_need_a_mode_that_the_gpu_lacks_are_refused(state: GpuState, desired: DesiredVgpus) -> None:
    plan = planned(state, desired)
    assert ({reason.code for reason in plan.refusals}, plan.steps) == ({ReasonCode.MODE_UNSUPPORTED}, ())
    assert planned(without(), desired).refusals == ()


@pytest.mark.parametrize(
    "state",
    [
        without(mixed_sizes=False, can_mix=None),
        without(mixed_sizes=None, can_mix=True),
        without(mig=True, mixed_sizes=None, can_mix=None),
    ],
    ids=["the mode is off", "nvidia-smi", "the catalog, in MIG mode"],
)
def test_mixed_sizes_are_planned_where_one_source_shows_that_the_gpu_has_the_mode(state: GpuState) -> None:
    assert planned(state, MIXED).refusals == ()


def test_vgpus_are_refused_while_mig_mode_is_unread() -> None:
    state = without()
    assert state.smi is not None
    unread = replace(state, smi=replace(state.smi, modes=replace(state.smi.modes, mig=ODD)))
    plan = planned(unread, MIG_BACKED)
    assert ([reason.code for reason in plan.refusals], plan.steps) == ([ReasonCode.UNREAD], ())


def test_several_sizes_are_refused_for_one_reason_while_the_mode_is_unread() -> None:
    plan = planned(without(mixed_sizes=ODD), DesiredVgpus({"A30-4C": 1, "A30-8C": 1}))
    assert ([reason.code for reason in plan.refusals], plan.steps) == ([ReasonCode.UNREAD], ())


@pytest.mark.parametrize(
    ("state", "desired", "words"),
    [
        (without(), {"A30-1-6C": 5}, "at most 4"),
        (without(), {"A30-2-12C": 2, "A30-1-6C": 1}, "the GPU instances"),
        (without(), {"A30-4C": 7}, "at most 6"),
        (without(mixed_sizes=True), {"A30-12C": 2, "A30-4C": 1}, "they don't fit side by side in mixed-size mode"),
        (without(mixed_sizes=True), {"A30-8C": 2, "A30-6C": 1}, "in mixed-size mode"),
        (replace(in_mig_mode(), card=None), {"A30-1-6C": 1}, "is not known"),
    ],
)
def test_more_vgpus_than_fit_are_refused_before_a_step(state: GpuState, desired: dict[str, int], words: str) -> None:
    plan = planned(state, DesiredVgpus(desired))
    (reason,) = plan.refusals
    assert (reason.code, plan.steps) == (ReasonCode.NO_ROOM, ())
    assert words in reason.text


def test_a_type_whose_number_is_not_known_does_not_count_by_the_number_of_another() -> None:
    other = VgpuType("NVIDIA A30-4Q")
    plan = plan_vgpus(without(), {NAMES["A30-4C"]: 4, other: 4})
    assert plan.refusals == ()


def test_gpu_instances_stay_where_no_vgpu_is_desired() -> None:
    assert planned(in_mig_mode(*ONE_ON_EACH_HALF), DesiredVgpus()).steps == ()


@pytest.mark.parametrize("is_card_known", [True, False])
def test_no_gpu_instance_is_planned_before_nvidia_smi_has_reported_the_existing_ones(is_card_known: bool) -> None:
    state = replace(gpu_state(), smi=None)
    plan = planned(state if is_card_known else replace(state, card=None), MIG_BACKED)
    assert plan.refusals == ()
    assert [type(step) for step in plan.steps] == [CreateVgpu]
