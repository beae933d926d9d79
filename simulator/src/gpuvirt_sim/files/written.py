"""How the kernel parses a text that is written to an attribute."""

import errno

from gpuvirt_sim.files.tree import fails

LONGEST = 4094
"""One page, less the end of the text (drivers/base/driver.c)."""


def name(text: str) -> str:
    """Return a name, without one newline at its end; other whitespace is part of it."""
    return text.removesuffix("\n")


def number(text: str) -> int:
    """Return a number from 0; raise EINVAL for anything else."""
    try:
        value = int(name(text), 0)
    except ValueError as error:
        raise fails(errno.EINVAL, text) from error
    if value < 0:
        raise fails(errno.EINVAL, text)
    return value


def short(text: str) -> int:
    """Return a number of 16 bits; raise EINVAL for anything else (kstrtou16)."""
    value = number(text)
    if value > 0xFFFF:
        raise fails(errno.EINVAL, text)
    return value


def override(text: str) -> str | None:
    """Return the driver of an override: the first line, None where it is empty."""
    if len(text) > LONGEST:
        raise fails(errno.EINVAL, text[:32])
    return text.partition("\n")[0] or None
