"""A simulated function's BARs, as its `resource` attribute lists them."""

LINES = 13
"""Six BARs, the expansion ROM, and six BARs that the VFs share."""

SMALL = (0xA0000000, 0xA0FFFFFF, 0x40200)
LARGE_BYTES = 32 << 30
LARGE_AT = 0x38000000000
PREFETCHABLE_64 = 0x14220C


def resource(*, unassigned: bool = False) -> str:
    """Return the BARs of a GPU with 32 GiB, a small and a large one; an unassigned large one starts at 0."""
    start = 0 if unassigned else LARGE_AT
    bars = [SMALL, (start, start + LARGE_BYTES - 1, PREFETCHABLE_64)]
    bars += [(0, 0, 0)] * (LINES - len(bars))
    return "".join(f"0x{first:016x} 0x{last:016x} 0x{flags:016x}\n" for first, last, flags in bars)
