"""vGPUs that need a mode which the GPU does not have are refused before a step."""

from dataclasses import replace

import pytest

from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.desired.vgpuentries import Sizes
from gpuvirt.model.reasons import ReasonCode
from tests.vgpu.test_mode_plans import gpu_state, planned

MIG_BACKED = DesiredVgpus({"A30-1-6C": 1})
MIXED = DesiredVgpus({"A30-4C": 1, "A30-8C": 1}, Sizes.MIXED)


def without(*, mig: bool | None = False, mixed_sizes: bool | None = False, can_mix: bool | None = True) -> GpuState:
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
