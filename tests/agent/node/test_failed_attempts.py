"""The reason of a change that could not begin names what kept it; the change is tried again."""

import pytest

from gpuvirt.agent.change.gate.gatelock import UnitBlockedError, UnitBusyError, UnitUnsettledError
from gpuvirt.agent.change.steps.changes import Change, Changes
from gpuvirt.agent.reconcile.unitchanges import ChangeRequest, attempt
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import ReasonCode
from tests.inlineworker import InlineWorker

FAILURES = [
    (UnitBlockedError("busy", "unbind it"), ReasonCode.WRITE_BLOCKED, "unbind it"),
    (UnitUnsettledError("just allocated"), ReasonCode.ADMISSION_UNSETTLED, "just allocated"),
    (UnitBusyError("another process changes it"), ReasonCode.UNIT_BUSY, "another process changes it"),
    (OSError(5, "Input/output error", "/sys/x"), ReasonCode.STEP_FAILED, "/sys/x"),
]


@pytest.mark.parametrize(("error", "code", "text"), FAILURES)
async def test_a_change_that_cannot_begin_has_a_reason(error: Exception, code: ReasonCode, text: str) -> None:
    def fail() -> Outcome:
        raise error

    change = Change(Changes(lambda: ()), "unit", lambda: True, None)
    desired = {PciAddress("0000:65:00.0"): DesiredGpu(DesiredDriver.PASSTHROUGH)}
    request = ChangeRequest(UnitId("unit"), desired, change, None, lambda: None, lambda _: None)
    found = await attempt(request, fail, [], InlineWorker(), 1.0)
    (reason,) = found.outcome.reasons
    assert (reason.code, found.blocked_at) == (code, None)
    assert text in reason.text
