"""The units of GPUs: whole cards, and every vGPU type of the catalog as a VM sees it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PciId, parse_pci_id
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.sharedgpus import UnknownType, type_label, units_of, vgpu_type_of
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Profile

V100, OTHER = parse_pci_id("10de:1db4"), PciId(0x10DE, 0x1234)
TYPES = [(card, kind) for card in catalog.cards() for kind in card.types()]
LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def kind_of(name: str) -> Profile:
    found = vgpu_type_of(name)
    assert isinstance(found, Profile)
    return found


@pytest.mark.parametrize("prefix", ["GRID ", "NVIDIA ", ""])
@given(found=st.sampled_from(TYPES), whole=st.integers(1, 10_000))
def test_a_vgpu_has_its_framebuffers_part_of_its_cards_units(
    prefix: str, found: tuple[Card, CardType], whole: int
) -> None:
    card, kind = found
    units = units_of(f"{prefix}{kind.profile}", card.ids[0].device, Units(whole))
    assert isinstance(units, int)
    assert units == whole * kind.profile.framebuffer_mib // card.framebuffer_mib
    assert units <= whole
    if not kind.profile.is_mig:
        assert units * kind.most <= whole


@given(found=st.sampled_from(TYPES))
def test_every_type_is_a_valid_label(found: tuple[Card, CardType]) -> None:
    assert LABEL_VALUE.fullmatch(type_label(found[1].profile))


@pytest.mark.parametrize(
    ("model", "units", "label"),
    [
        ("GRID V100-8Q", 500, "v100-8q-8GB"),
        ("GRID V100-4Q", 250, "v100-4q-4GB"),
        ("GRID V100-16Q", 1000, "v100-16q-16GB"),
        ("NVIDIA A40-8Q", 166, "a40-8q-8GB"),
        ("NVIDIA A100-1-5C", 125, "a100-1-5c-5GB"),
        ("NVIDIA A100-1-5CME", 125, "a100-1-5cme-5GB"),
        ("GRID M60-0Q", 62, "m60-0q-512MB"),
        ("NVIDIA RTX6000-Ada-24Q", 500, "rtx6000-ada-24q-24GB"),
    ],
)
def test_vgpus_of_known_cards(model: str, units: int, label: str) -> None:
    assert units_of(model, OTHER) == units
    assert type_label(kind_of(model)) == label


@pytest.mark.parametrize(
    "model",
    [
        "Tesla T4", "Tesla V100-PCIE-16GB", "Tesla V100-SXM2-32GB-LS", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation",
        "Quadro RTX 8000", "NVIDIA GH200 480GB", "NVIDIA RTX A6000", "NVIDIA Graphics Device",
    ],
)  # fmt: skip
def test_a_whole_card_has_all_units(model: str) -> None:
    assert vgpu_type_of(model) is None
    assert units_of(model, V100) == WHOLE


@pytest.mark.parametrize("model", ["GRID V200-8Q", "NVIDIA V100-5Q", "GRID T4-2B4", "GRID something new", "X9-7Q"])
def test_a_type_that_the_catalog_lacks_has_no_units(model: str) -> None:
    assert units_of(model, V100) == UnknownType(model)


def test_a_type_of_two_cards_needs_the_pci_id_of_the_card() -> None:
    model = "NVIDIA RTX Pro 6000 Blackwell DC-16Q"
    large, small = sorted(catalog.cards_called("DC"), key=lambda card: -card.framebuffer_mib)
    assert units_of(model, large.ids[0].device) == 1000 * 16384 // large.framebuffer_mib
    assert units_of(model, small.ids[0].device) == 1000 * 16384 // small.framebuffer_mib
    unknown = units_of(model, OTHER)
    assert isinstance(unknown, UnknownType)
    assert unknown.cards == tuple(sorted((large.product_name, small.product_name)))
