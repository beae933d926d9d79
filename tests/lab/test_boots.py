"""A guest whose boot is not ready in time is replaced once, and no more often."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from lab.kernel.errors import NotBootedError
from lab.kernel.kit import Flavour

from tests.contract import guesthost


class Boots:
    """Boots of which the first ones fail."""

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.begun = self.ended = 0

    @contextmanager
    def booted(self, _kit: object) -> Iterator[SimpleNamespace]:
        self.begun += 1
        try:
            if self.begun <= self.failing:
                raise NotBootedError("no timer")
            yield SimpleNamespace(kernel=None)
        finally:
            self.ended += 1


def boots(monkeypatch: pytest.MonkeyPatch, failing: int) -> Boots:
    """Let guests boot so."""
    found = Boots(failing)
    monkeypatch.setattr(guesthost, "prepare", str)
    monkeypatch.setattr(guesthost, "booted", found.booted)
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_a_boot_that_is_not_ready_in_time_is_tried_again(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    found = boots(monkeypatch, failing)
    with guesthost.Guests() as guests:
        guests.fresh(Flavour.BOTH)
        assert (found.begun, found.ended) == (failing + 1, failing), "one guest runs"
    assert found.ended == failing + 1


def test_a_second_failure_is_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = boots(monkeypatch, 2)
    with guesthost.Guests() as guests, pytest.raises(NotBootedError):
        guests.fresh()
    assert found.ended == 2
