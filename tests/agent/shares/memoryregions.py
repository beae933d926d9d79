"""Regions as HAMi-core 8f3a89c makes them."""

import struct

from gpuvirt.model.shares.node.memoryregion import COUNT_AT, HEADER_BYTES, MAGIC, SLOT_BYTES

REGION_BYTES = 2008952
"""The size of the file."""


def region(*used: int) -> bytes:
    """Return the region of a container whose processes use so many bytes of its first GPU."""
    content = bytearray(REGION_BYTES)
    struct.pack_into("<iII", content, 0, MAGIC, 1, 2)
    for number, total in enumerate(used):
        slot = HEADER_BYTES + number * SLOT_BYTES
        struct.pack_into("<ii", content, slot, 100 + number, 4000 + number)
        struct.pack_into("<Q", content, slot + 8 + 32, total)
    struct.pack_into("<i", content, COUNT_AT, len(used))
    return bytes(content)
