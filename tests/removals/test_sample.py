"""A sample of the guards is removed in each run; `make removals` removes all guards."""

import hashlib

import pytest

from tests.removals.__main__ import by_killers, make, read_killers, sample
from tests.removals.guards import CHILD_RINGS, modules, removals, ring_of, source_of
from tests.removals.unnoticed import UNNOTICED

SAMPLE = 40
"""The number of removals: a count and not a time, so that each computer makes the same ones."""


def seed() -> str:
    """Return a seed that changes with the code, so that each change of the code has another sample."""
    digest = hashlib.sha256()
    for module in modules():
        digest.update(source_of(module).read_bytes())
    return digest.hexdigest()


def test_a_guard_that_is_neither_noticed_nor_listed_is_in_each_sample() -> None:
    """A new guard has a test nearby, or a line in `unnoticed.py`: otherwise the change that adds it fails."""
    guards, killers = removals().keys() - UNNOTICED.keys(), read_killers()
    assert set(sample(len(guards), "", killers)) == guards
    new = sample(SAMPLE, seed(), killers)[-3:]
    others = {key: test for key, test in killers.items() if key not in new}
    assert set(sample(3, "another", others)) == set(new)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ring", [None, *(pytest.param(name, marks=pytest.mark.ring(name)) for name in CHILD_RINGS)])
def test_a_test_notices_each_removed_guard_of_a_sample(ring: str | None) -> None:
    killers, known = read_killers(), removals()
    keys = [key for key in sample(SAMPLE, seed(), killers) if ring_of(known[key].module) == ring]
    found = make([by_killers(key, killers) for key in keys])
    survivors = "\n".join(sorted(key for key, test in found.items() if not test))
    assert not survivors, f"no test notices without these guards; see tests/explore/README.md:\n{survivors}"
