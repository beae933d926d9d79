"""Reads the quantities of Kubernetes that count units: `300`, `1k`, `2e3`.

The API server writes the shortest form of a quantity, so that 1000 units are `1k`, and 2500 are `2500`. Source:
Kubernetes' API reference, resource.Quantity; the amount of an extended resource is an integer.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal, localcontext

from gpuvirt.errors import DamagedError
from gpuvirt.model.shares.demand import Units

MOST = 2**63 - 1
"""The largest quantity: the API server caps larger ones."""
_QUANTITY = re.compile(
    r"([+-]?(?:\d{1,40}(?:\.\d{0,9})?|\.\d{1,9}))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?", re.ASCII
)
_DECIMAL = {suffix: Decimal(10) ** (3 * power) for power, suffix in enumerate("num kMGTPE", -3)} | {"": Decimal(1)}
_BINARY = {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)}
_FACTORS = _DECIMAL | _BINARY


class InvalidQuantityError(DamagedError):
    """A quantity that is no number, negative, or no whole number of units."""


def units_of(quantity: str | float) -> Units:
    """Return the units that a container requests; raise InvalidQuantityError."""
    text = str(quantity).strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return Units(int(text))
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidQuantityError(f"{text[:40]!r} is not a quantity; expected a whole number of units")
    number, suffix, exponent = match.groups()
    with localcontext(prec=160):  # digits enough for the longest number and the largest exponent
        units = Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _FACTORS[suffix or ""])
    if units > MOST:
        return Units(MOST)
    if units < 0 or units != units.to_integral_value():
        raise InvalidQuantityError(f"{text} is not a number of units; expected a whole number, 0 or more")
    return Units(int(units))


def is_quantity(quantity: str | int) -> bool:
    """Return whether a text is a quantity, also of something else than units: `100m`, `128Mi`."""
    return _QUANTITY.fullmatch(str(quantity)) is not None


def whole_amounts(quantities: Mapping[str, str | float]) -> dict[str, int]:
    """Return the amounts of resources by name; those that are no whole number, such as `7900m`, are left out."""
    amounts: dict[str, int] = {}
    for name, quantity in quantities.items():
        with suppress(InvalidQuantityError):
            amounts[name] = units_of(quantity)
    return amounts
