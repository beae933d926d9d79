"""All schedules with few departures from the default: no pod and no process is harmed, and all comes to rest."""

from pathlib import Path

import pytest

from explore.__main__ import own_folder, tell
from explore.explorer import Explorer
from explore.known import KNOWN, Known, is_known
from explore.mutations import GUARDS
from explore.removal import find_missing
from explore.scenarios import SCENARIOS
from explore.seeds import parse
from explore.shrink import kind_of, shrink
from thoroughness import examples

MOST_SCHEDULES = 40
QUICKLY_MISSED = (
    "gate: no step of a plan that took too long",
    "planning: pods",
    "planning: pods whose device is not found here",
    "reconciler: the account is newer than what was withdrawn",
    "allocation check: what the device is",
    "allocation check: who uses the device",
    "allocation: a group is not given to two pods",
    "account: pods of the checkpoint",
    "ledger: pods that another agent has served",
    "ledger: an allocation counts before the kubelet lists it",
    "executor: the driver after a step is the expected one",
    "binder: what failed is put back",
)

SCHEDULES = 60
"""Of each scenario; a count and not a time, so that each computer tries the same."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_schedule_violates_an_invariant(name: str) -> None:
    with own_folder() as folder:
        explorer = Explorer(name, SCENARIOS[name], folder)
        left = examples(SCHEDULES)
        for found in explorer.explore(2, lambda: explorer.tally.schedules >= left):
            if not is_known(name, kind_of(found.failure)):
                small = shrink(explorer, found)
                pytest.fail(f"{tell(small.failure)}\nagain: make explore SEED='{small.seed}'")


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN.keys())
def test_what_is_known_is_still_found(known: Known, tmp_path: Path) -> None:
    """A finding that is mended leaves the list."""
    failure = Explorer(known.scenario, SCENARIOS[known.scenario], tmp_path).try_seed(parse(known.seed)).failure
    assert failure is not None
    assert kind_of(failure) == known.kind


@pytest.mark.parametrize("name", QUICKLY_MISSED)
def test_a_guard_that_is_removed_is_missed(name: str, tmp_path: Path) -> None:
    """Those that a few schedules show; `make explore-mutations` removes them all."""
    count = iter(range(MOST_SCHEDULES))
    with GUARDS[name].removed():
        found, _ = find_missing(GUARDS[name], tmp_path, lambda: next(count, None) is None)
    assert found is not None


def test_a_seed_plays_the_same_schedule_each_time(tmp_path: Path) -> None:
    explorer = Explorer("killed", SCENARIOS["killed"], tmp_path)
    seed = parse("killed:12.1,30.2:-2.0")
    assert str(seed) == "killed:12.1,30.2:-2.0"
    stories = [explorer.try_seed(seed, told=True).story for _ in range(3)]
    assert "--- at rest" in stories[0]
    assert stories[0] == stories[1] == stories[2]
