"""Transitions end in the phase of now, or are held with a reason, whatever fails; each guard is needed for that."""

import pytest

from tests.schedules.explore import explored, violation
from tests.schedules.removals import REMOVALS
from tests.thoroughness import examples

SEEDS = range(examples(70))
"""Three transitions each: over 200 together."""
MOST_SEEDS = 300


def test_transitions_survive_what_fails() -> None:
    found = explored(SEEDS)
    assert found is None, f"seed {found[0]}:\n{found[1]}"


@pytest.mark.parametrize("guard", sorted(REMOVALS))
def test_the_removal_of_a_guard_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in REMOVALS[guard]:
        monkeypatch.setattr(patch.place, patch.name, patch.without)
    assert any(violation(seed) is not None for seed in range(MOST_SEEDS))
