"""The progress that a node reports, and the reasons that it waits for."""

import pytest

from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node import progress
from gpuvirt.model.reasons import Reason, ReasonCode
from tests.agent.life.life import LEFT, T4
from tests.agent.node.pictures import decided_at, desiring, observed

WAITS = Reason(ReasonCode.VGPU_IN_USE, T4, "is in use")
OF_DRIVERS, OF_VGPUS = Outcome((WAITS,), {LEFT: ()}), Outcome(vgpus={T4: (WAITS,)})


@pytest.mark.parametrize(
    ("mode", "outcome", "workload_waits", "vgpus_wait"),
    [
        (DesiredMode.PASSTHROUGH, Outcome(), False, None),
        (DesiredMode.PASSTHROUGH, OF_DRIVERS, True, None),
        (DesiredMode.PASSTHROUGH, OF_VGPUS, True, None),
        (DesiredMode.VGPU, OF_DRIVERS, True, True),
        (DesiredMode.VGPU, Outcome((WAITS,), {T4: ()}), True, False),
        (DesiredMode.VGPU, OF_VGPUS, False, False),
    ],
)
def test_the_reported_progress_has_the_reasons_that_a_state_waits_for(
    mode: DesiredMode, outcome: Outcome, *, workload_waits: bool, vgpus_wait: bool | None
) -> None:
    """The first T4 waits for the driver that makes vGPUs; the one with vGPUs has those of its config already."""
    picture = desiring(observed(), mode, "T4-8Q" if mode is DesiredMode.VGPU else None)
    decided, outcomes = decided_at(picture), {UnitId(T4): outcome}
    workload = progress.of_workload(picture, decided, outcomes, drivers_differ=False)
    vgpus = progress.of_vgpus(picture, decided, outcomes)
    assert workload is not None
    assert workload.reason == (WAITS.text if workload_waits else "")
    assert vgpus is not None
    assert (vgpus.name is None) == (vgpus_wait is None), "no vGPUs are desired"
    assert vgpus.reason == (WAITS.text if vgpus_wait else "")
