"""The memory of a container by HAMi-core's region: any bytes are an answer, since the container writes them."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.shares.node.memoryregion import (
    COUNT_AT,
    HEADER_BYTES,
    MAGIC,
    MOST_BYTES,
    SLOT_BYTES,
    SLOTS,
    UnreadableUse,
    count_of_slots,
    used_bytes,
)
from tests.agent.shares.memoryregions import REGION_BYTES, region


def read(content: bytes) -> int | UnreadableUse:
    """Read a region as the agent does."""
    count = count_of_slots(content[:HEADER_BYTES], content[COUNT_AT : COUNT_AT + 4])
    if isinstance(count, UnreadableUse):
        return count
    return used_bytes(content[HEADER_BYTES : HEADER_BYTES + count * SLOT_BYTES])


def test_the_layout_is_that_of_a_compiled_header() -> None:
    """The program that prints these was compiled by gcc 12 on x86-64 from HAMi-core's header (8f3a89c)."""
    assert (HEADER_BYTES, SLOT_BYTES, COUNT_AT, REGION_BYTES) == (1856, 1960, 2008896, 2008952)
    assert len(region(1, 2)) == REGION_BYTES


@pytest.mark.parametrize("processes", [(), (5,), (1 << 30, 0, 7 << 20)])
def test_a_container_uses_what_its_processes_use_together(processes: tuple[int, ...]) -> None:
    assert read(region(*processes)) == sum(processes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "shorter"),
        (region(5)[:COUNT_AT], "shorter"),
        (bytes(REGION_BYTES), "not initialised"),
        (struct.pack("<iII", MAGIC, 1, 1) + region(5)[12:], "version 1.1"),
        (region(5)[:COUNT_AT] + struct.pack("<i", 1025) + bytes(52), "1025 processes"),
        (region(5)[:COUNT_AT] + struct.pack("<i", -1) + bytes(52), "-1 processes"),
        (region((1 << 64) - 1), "more memory than a GPU has"),
        (region(MOST_BYTES, 1), "more memory than a GPU has"),
    ],
    ids=["empty", "cut", "zeros", "version", "many", "negative", "most", "sum"],
)
def test_a_region_that_tells_nothing_is_unknown_and_not_empty(content: bytes, why: str) -> None:
    found = read(content)
    assert isinstance(found, UnreadableUse)
    assert why in found.why


@given(st.binary(max_size=3000), st.binary(max_size=8), st.binary(max_size=3 * SLOT_BYTES))
def test_any_bytes_are_an_answer(header: bytes, count: bytes, slots: bytes) -> None:
    found = count_of_slots(header, count)
    assert isinstance(found, UnreadableUse) or 0 <= found <= SLOTS
    used = used_bytes(slots)
    assert isinstance(used, UnreadableUse) or 0 <= used <= MOST_BYTES
