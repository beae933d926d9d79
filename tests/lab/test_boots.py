"""A guest whose boot is not ready in time is replaced once, and no more often; it runs while a test has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
        self.runs: list[bool] = []
        """Whether the guest ran, after each call that changed it."""

    @contextmanager
    def booted(self, _kit: object) -> Iterator[SimpleNamespace]:
        self.begun += 1
        try:
            if self.begun <= self.failing:
                raise NotBootedError("no timer")
            pause, resume = (partial(self.runs.append, runs) for runs in (False, True))
            yield SimpleNamespace(kernel=None, pause=pause, resume=resume, restore=lambda: self.runs[-1])
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
    with guesthost.Guests() as guests, guests.fresh(Flavour.BOTH):
        assert (found.begun, found.ended) == (failing + 1, failing), "one guest runs"
    assert found.ended == failing + 1


def test_a_second_failure_is_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = boots(monkeypatch, 2)
    with guesthost.Guests() as guests, pytest.raises(NotBootedError), guests.fresh():
        pass
    assert found.ended == 2


def test_a_guest_runs_while_a_test_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = boots(monkeypatch, 0)
    with guesthost.Guests() as guests:
        for runs in ([], [False, True]):
            with guests.fresh():
                assert found.runs == runs
        assert (found.runs, found.begun) == ([False, True, False], 1)
