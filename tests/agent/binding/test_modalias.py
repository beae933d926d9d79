"""The choice of the VFIO driver with the best alias for a function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import parse_pci_address, parse_pci_id
from gpuvirt.facts.pci import PciFunction
from gpuvirt.model.change.nativedrivers import best_vfio_driver, modalias

GRACE = PciFunction(
    parse_pci_address("0009:01:00.0"), parse_pci_id("10de:2342"), 0x030200, subsystem=parse_pci_id("10de:16eb")
)
ALIASES = """\
# Aliases extracted from modules themselves.
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
"""


def test_the_alias_with_the_fewest_wildcards_is_best() -> None:
    assert best_vfio_driver(ALIASES, GRACE) == "nvgrace_gpu_vfio_pci"


def test_the_first_of_equal_aliases_is_best() -> None:
    twice = "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* first\nalias vfio_pci:v000010DEd*sv*sd*bc03sc*i* second"
    assert best_vfio_driver(twice, GRACE) == "first"


OTHER_CARD = "alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci"
SET = "alias vfio_pci:v000010DEd0000234[0-9]sv*sd*bc*sc*i* no_alias_of_pci_has_a_set"


@pytest.mark.parametrize(
    "aliases",
    ["", "alias vfio_pci:", "alias vfio_pci:v*", "alias pci:v* nvidia", "\x00\x00", OTHER_CARD, SET],
)
def test_vfio_pci_is_best_if_no_alias_matches(aliases: str) -> None:
    assert best_vfio_driver(aliases, GRACE) == "vfio-pci"


def test_the_modalias_of_a_function() -> None:
    assert modalias(GRACE) == "v000010DEd00002342sv000010DEsd000016EBbc03sc02i00"


@given(st.text())
def test_arbitrary_content_of_modules_alias_is_read(text: str) -> None:
    assert best_vfio_driver(text, GRACE)
    assert best_vfio_driver(f"alias vfio_pci:{text}", GRACE)
