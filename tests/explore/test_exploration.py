"""All schedules with few departures from the default: no pod and no process is harmed, and all comes to rest."""

from pathlib import Path

import pytest

from explore.__main__ import own_folder, tell
from explore.explorer import Explorer
from explore.known import KNOWN, Known, is_known
from explore.scenarios import SCENARIOS
from explore.seeds import parse
from explore.shrink import kind_of, shrink
from thoroughness import examples

SCHEDULES = 100
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


def test_a_seed_plays_the_same_schedule_each_time(tmp_path: Path) -> None:
    explorer = Explorer("killed", SCENARIOS["killed"], tmp_path)
    seed = parse("killed:12.1,30.2:-2.0")
    assert str(seed) == "killed:12.1,30.2:-2.0"
    stories = [explorer.try_seed(seed, told=True).story for _ in range(3)]
    assert "--- at rest" in stories[0]
    assert stories[0] == stories[1] == stories[2]
