"""Tests that use the CPU for a known time, for the test of the limit; pytest collects them only by name."""

from time import process_time

import pytest

from gpuvirt.agent.change.gate.gaterecord import GateRecord, IllegalMoveError


def burn(seconds: float) -> None:
    """Use the CPU."""
    end_s = process_time() + seconds
    while process_time() < end_s:
        pass


@pytest.mark.parametrize("number", range(4))
def test_a_second(number: int) -> None:
    """Use as much of the CPU as a slow test."""
    del number
    burn(1.0)


def test_four_seconds() -> None:
    """Use more of the CPU than the limit allows."""
    burn(4.0)


def test_without_end_unless_a_step_is_refused() -> None:
    """Try again and again what the record of an open gate refuses."""
    record = GateRecord("boot")
    while record.generation == 0:
        try:
            record.in_step("unbind it")
        except IllegalMoveError:
            return
