"""A schedule that the reduction omits has the same execution as a schedule that is run, and no finding is lost."""

from pathlib import Path

import pytest

from tests.explore.explorer import Explorer
from tests.explore.mutations import GUARDS
from tests.explore.reduction import ALL, DESIRED, KERNEL, STRANDS, Choice, redundant
from tests.explore.run import Outcome
from tests.explore.scenarios import SCENARIOS
from tests.explore.seeds import Seed
from tests.explore.shrink import kind_of

SCENARIOS_THAT_REDUCE = ("return-or-admission", "container-is-taken", "command-or-admission", "vm-by-hand-or-pod")
GUARDS_BY_ORDER = {
    "allocation check: who uses the device": "vm-by-hand-or-pod",
}


def _choice(touched: set[str], *movable: tuple[int, str, str]) -> Choice:
    return Choice(tuple((index, name, frozenset({touches})) for index, name, touches in movable), touched)


def test_an_action_is_redundant_before_a_segment_that_it_does_not_touch() -> None:
    want, bind = (1, "want", DESIRED), (2, "a command", STRANDS)
    choices = [
        _choice({KERNEL}, want, bind),
        _choice({KERNEL, STRANDS}, want, bind),
        _choice({ALL}, want, bind),
        _choice(set(), want, bind),
        _choice({DESIRED}, bind),
        _choice(set()),
    ]
    assert list(redundant(choices)) == [(0, 1), (0, 2), (1, 1), (3, 2)]


def _executed(outcome: Outcome) -> tuple[list[str], str]:
    """Return the operations on the host, the allocations, and the kind of the failure."""
    lines = [line for line in outcome.story if line.startswith("    ") or "is given" in line or "is refused" in line]
    return lines, kind_of(outcome.failure) if outcome.failure is not None else ""


@pytest.mark.parametrize("name", SCENARIOS_THAT_REDUCE)
def test_an_omitted_schedule_has_the_execution_of_another_schedule(name: str, tmp_path: Path) -> None:
    explorer = Explorer.of(name, tmp_path)
    choices = explorer.try_seed(Seed(name)).choices
    found = list(redundant(choices))
    assert found
    for step, option in found:
        action = next(movable for index, movable, _ in choices[step].movable if index == option)
        later = next(index for index, movable, _ in choices[step + 1].movable if movable == action)
        left_out, run = (
            explorer.try_seed(Seed(name, {at: index}), traced=True) for at, index in ((step, option), (step + 1, later))
        )
        assert _executed(left_out) == _executed(run), f"{name}:{step}.{option}: {action}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("guard", GUARDS_BY_ORDER)
def test_the_reduction_loses_no_finding(guard: str, tmp_path: Path) -> None:
    kinds: list[set[str]] = []
    with GUARDS[guard].removed():
        for reduces in (True, False):
            explorer = Explorer(GUARDS_BY_ORDER[guard], SCENARIOS[GUARDS_BY_ORDER[guard]], tmp_path, reduces=reduces)
            kinds.append({kind_of(found.failure) for found in explorer.explore(1, lambda: False)})
            assert bool(explorer.tally.redundant) is reduces
    assert kinds[0] == kinds[1] != set()
