"""The reason of a change that could not begin names what kept it; the change is tried again."""

import pytest

from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node.change.changeworker import JobFailed, attempt
from gpuvirt.node.change.gate.gateerrors import UnitBlockedError, UnitBusyError, UnitUnsettledError
from tests.inlineworker import InlineWorker

FAILURES = [
    (UnitBlockedError("busy", "unbind it"), ReasonCode.WRITE_BLOCKED, "unbind it"),
    (UnitUnsettledError("just allocated"), ReasonCode.ALLOCATIONS_UNKNOWN, "just allocated"),
    (UnitBusyError("another process changes it"), ReasonCode.UNIT_BUSY, "another process changes it"),
    (OSError(5, "Input/output error", "/sys/x"), ReasonCode.STEP_FAILED, "/sys/x"),
]


@pytest.mark.parametrize(("error", "code", "text"), FAILURES)
async def test_a_change_that_cannot_begin_has_a_reason(error: Exception, code: ReasonCode, text: str) -> None:
    def fail() -> tuple[Reason, ...]:
        raise error

    found = await attempt("unit", fail, [], worker=InlineWorker(), timeout_s=1.0)
    assert isinstance(found, JobFailed)
    assert found.reason.code is code
    assert text in found.reason.text
