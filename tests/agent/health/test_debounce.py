"""A debounced symptom counts at the very time that the verdict names, whatever the clock's fractions are."""

from hypothesis import example, given
from hypothesis import strategies as st

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import DEBOUNCE, HealthVerdict, judge
from gpuvirt.model.reasons import Reason, ReasonCode

KEY = (ResourceName("nvidia.com/GA102GL_A10"), DeviceId("0000:65:00.0"))
RAISED = sorted(code for code, debounce in DEBOUNCE.items() if debounce.raise_after_s)
CLEARED = sorted(code for code, debounce in DEBOUNCE.items() if debounce.clear_after_s)
TIMES = st.floats(0, 1e7)


@given(st.sampled_from(RAISED), TIMES)
@example(ReasonCode.IN_USE_ELSEWHERE, 11.159999999999998)
def test_a_symptom_counts_at_the_time_at_which_it_is_judged_again(code: ReasonCode, since_s: float) -> None:
    symptom = Reason(code, KEY[1], "it is seen")
    healthy = judge(HealthVerdict(), {KEY: ()}, since_s)
    seen = judge(healthy, {KEY: (symptom,)}, since_s)
    assert seen.health(KEY).healthy
    assert seen.again_at_s is not None
    counted = judge(seen, {KEY: (symptom,)}, seen.again_at_s)
    assert counted.health(KEY).against == (symptom,)
    assert counted.again_at_s is None


@given(st.sampled_from(CLEARED), TIMES)
def test_a_symptom_is_cleared_at_the_time_at_which_it_is_judged_again(code: ReasonCode, gone_s: float) -> None:
    symptom = Reason(code, KEY[1], "it is seen")
    counted = judge(HealthVerdict(), {KEY: (symptom,)}, gone_s)
    gone = judge(counted, {KEY: ()}, gone_s)
    assert gone.health(KEY).against == (symptom,)
    assert gone.again_at_s is not None
    assert judge(gone, {KEY: ()}, gone.again_at_s) == HealthVerdict({KEY: {}})
