"""The garbage collector is kept out of a turn of decisions, and comes back whatever the turn ends with."""

import gc
from collections.abc import Iterator

import pytest

from gpuvirt.agent.known.state import uncollected


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collections_go_on_after_a_turn() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_a_turn_that_fails() -> None:
    with pytest.raises(ValueError, match="failed"), uncollected():
        raise ValueError("failed")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
