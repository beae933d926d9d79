"""Transitions end in the current phase, or are held with a reason, whatever fails; each guard is needed for that."""

from collections.abc import Mapping

import pytest

from tests.schedules.explore import explored, violation
from tests.schedules.lagworld import LagWorld
from tests.schedules.profileworld import ProfileWorld
from tests.schedules.removals import LAG_REMOVALS, PROFILE_REMOVALS, REMOVALS, VM_REMOVALS
from tests.schedules.vmworld import VmWorld
from tests.thoroughness import examples

PART = 10
SEEDS = range(0, examples(7) * PART, PART)
"""Three transitions each: over 200 together."""
VM_SEEDS = range(0, examples(2) * PART, PART)
"""Nodes that wait for VMs have a round every five seconds, so that these runs are long."""
MOST_SEEDS = 300
FIRST_SEEDS: Mapping[str, int] = {
    "admin's cordon": 23,
    "cordon before eviction": 16,
    "new heartbeat": 96,
    "older connections are dead": 46,
}
"""The first seed that notices a removal, where it is late: it is tried first."""


@pytest.mark.parametrize("first", SEEDS)
def test_transitions_survive_what_fails(first: int) -> None:
    found = explored(range(first, first + PART))
    assert found is None, f"seed {found[0]}:\n{found[1]}"


@pytest.mark.parametrize("first", SEEDS)
def test_changes_of_vgpu_types_survive_what_fails(first: int) -> None:
    found = explored(range(first, first + PART), ProfileWorld)
    assert found is None, f"seed {found[0]}:\n{found[1]}"


@pytest.mark.parametrize("first", VM_SEEDS)
def test_stops_of_vms_survive_what_fails(first: int) -> None:
    found = explored(range(first, first + PART), VmWorld)
    assert found is None, f"seed {found[0]}:\n{found[1]}"


@pytest.mark.parametrize("first", SEEDS)
def test_switches_are_not_undone_by_clocks_that_lag(first: int) -> None:
    found = explored(range(first, first + PART), LagWorld)
    assert found is None, f"seed {found[0]}:\n{found[1]}"


@pytest.mark.parametrize("guard", sorted(LAG_REMOVALS))
def test_the_removal_of_a_guard_against_lagging_clocks_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in LAG_REMOVALS[guard]:
        monkeypatch.setattr(patch.place, patch.name, patch.without)
    assert any(violation(seed, make=LagWorld) is not None for seed in range(MOST_SEEDS))


@pytest.mark.parametrize("guard", sorted(VM_REMOVALS))
def test_the_removal_of_a_guard_of_stopped_vms_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in VM_REMOVALS[guard]:
        monkeypatch.setattr(patch.place, patch.name, patch.without)
    first = FIRST_SEEDS.get(guard, 0)
    assert any(violation(seed, make=VmWorld) is not None for seed in (first, *range(MOST_SEEDS)))


@pytest.mark.parametrize("guard", sorted(PROFILE_REMOVALS))
def test_the_removal_of_a_guard_of_vgpu_types_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in PROFILE_REMOVALS[guard]:
        monkeypatch.setattr(patch.place, patch.name, patch.without)
    assert any(violation(seed, make=ProfileWorld) is not None for seed in range(MOST_SEEDS))


@pytest.mark.parametrize("guard", sorted(REMOVALS))
def test_the_removal_of_a_guard_is_noticed(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in REMOVALS[guard]:
        monkeypatch.setattr(patch.place, patch.name, patch.without)
    first = FIRST_SEEDS.get(guard, 0)
    assert any(violation(seed) is not None for seed in (first, *range(MOST_SEEDS)))
