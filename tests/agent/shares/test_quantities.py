"""Units are read as the API server writes them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.shares.demand import InvalidQuantityError, units_of


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("300", 300),
        (300, 300),
        ("0", 0),
        ("1k", 1000),
        ("2500", 2500),
        ("2e3", 2000),
        ("1Ki", 1024),
        ("0.5k", 500),
        ("300000m", 300),
        ("+7", 7),
        ("1" + 18 * "0", 10**18),
        ("1E", 10**18),
        ("9" * 30, 2**63 - 1),
        ("1e99", 2**63 - 1),
        ("2000000000000000000000m", 2 * 10**18),
    ],
)
def test_the_api_servers_forms_are_read(text: str | int, units: int) -> None:
    assert units_of(text) == units


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1.5", "1500m", "0x10", "1 000", "٣", "1kk", "inf", "1e", "1" + 15 * "0" + "1e-1", "." * 300],
)
def test_what_is_no_number_of_units_is_refused(text: str) -> None:
    with pytest.raises(InvalidQuantityError):
        units_of(text)


@given(st.text(max_size=12) | st.from_regex(r"[+-]?[0-9.]{0,5}[a-zA-Z]{0,2}[0-9]{0,2}"))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidQuantityError):
        assert units_of(text) >= 0
