"""The catalog is consistent with itself, with NVIDIA's documentation, and with the shipped PCI ID database."""

from itertools import pairwise

import pytest

from gpuvirt.facts.ids import PciId, parse_pci_id
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.model.inventory import pciids
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt.model.vgputypes.profiles import Series, parse_profile, profile_name
from gpuvirt_sim.hostspec import shared_cards

CARDS = catalog.cards()
TYPES = [(card, vgpu_type) for card in CARDS for vgpu_type in card.types()]
A16_A2 = parse_pci_id("10de:25b6")


def card_of(device: str, subsystem: str | None = None) -> Card:
    (card,) = catalog.cards_of(parse_pci_id(device), parse_pci_id(subsystem) if subsystem else None)
    return card


def type_of(card: Card, name: str) -> CardType:
    found = card.find(parse_profile(name))
    assert found is not None
    return found


def test_every_type_name_parses_to_the_same_profile() -> None:
    for card, vgpu_type in TYPES:
        assert vgpu_type.profile.gpu == card.gpu
        for profile in (vgpu_type.profile, *vgpu_type.spelled):
            assert parse_profile(profile.text) == profile


def test_no_card_lists_a_type_twice() -> None:
    for card in CARDS:
        names = [profile for vgpu_type in card.types() for profile in (vgpu_type.profile, *vgpu_type.spelled)]
        assert len(names) == len(set(names)), card.product_name


def test_every_type_is_found_by_its_name() -> None:
    for card, vgpu_type in TYPES:
        assert card.find(vgpu_type.profile) == vgpu_type
        assert all(card.find(spelled) == vgpu_type for spelled in vgpu_type.spelled)


def test_no_two_cards_have_the_same_ids() -> None:
    ids = [device_id for card in CARDS for device_id in card.ids]
    assert len(ids) == len(set(ids))
    for card_id in ids:
        whole = [other for other in ids if other.device == card_id.device and other.subsystem is None]
        assert whole in ([card_id], []), f"{card_id.device} is a card without a subsystem id, and another card with one"


def test_ids_are_those_of_nvidia_cards_in_the_shipped_database() -> None:
    # The shipped database is of July 2025; these cards are newer.
    later = {parse_pci_id(pci_id) for pci_id in ("10de:2bb9", "10de:2c3a", "10de:3182", "10de:2337")}
    devices = {device_id.device for card in CARDS for device_id in card.ids}
    assert {device.vendor for device in devices} == {NVIDIA}
    assert {device for device in devices if device not in pciids.shipped()} <= later


def test_types_never_exceed_the_framebuffer_and_a_full_size_type_fits_once() -> None:
    for card, vgpu_type in TYPES:
        assert vgpu_type.profile.framebuffer_mib <= card.framebuffer_mib
        if not vgpu_type.profile.is_mig:
            assert vgpu_type.most * vgpu_type.profile.framebuffer_mib <= card.framebuffer_mib, vgpu_type.profile
        if vgpu_type.profile.framebuffer_mib == card.framebuffer_mib:
            assert vgpu_type.most == 1


def test_larger_types_never_fit_more_often() -> None:
    for card in CARDS:
        for series in Series:
            sliced = [
                vgpu_type
                for vgpu_type in card.types()
                if not vgpu_type.profile.is_mig and vgpu_type.profile.series is series
            ]
            mosts = [vgpu_type.most for vgpu_type in sorted(sliced, key=lambda vgpu_type: vgpu_type.profile.gb)]
            assert mosts == sorted(mosts, reverse=True), card.product_name


def test_placements_lie_side_by_side_inside_the_card_as_many_as_fit() -> None:
    seen = 0
    for card, vgpu_type in TYPES:
        if vgpu_type.placements is None:
            continue
        seen += 1
        assert vgpu_type.most_mixed == len(vgpu_type.placements)
        assert vgpu_type.placements[0] >= 0
        assert (vgpu_type.placements[-1] + vgpu_type.profile.gb) * 1024 <= card.framebuffer_mib
        assert all(before + vgpu_type.profile.gb <= after for before, after in pairwise(vgpu_type.placements)), (
            vgpu_type.profile
        )
    assert seen > 200


def test_mixed_size_mode_never_fits_more_vgpus_and_needs_a_card_that_supports_it() -> None:
    for card, vgpu_type in TYPES:
        if vgpu_type.most_mixed is not None:
            assert card.mixed_sizes
            assert vgpu_type.most_mixed <= vgpu_type.most, vgpu_type.profile


def test_mig_backed_types_fill_gpu_instances_of_their_slices() -> None:
    for card, vgpu_type in TYPES:
        assert (vgpu_type.gpu_instance is not None) == vgpu_type.profile.is_mig
        if vgpu_type.gpu_instance is None:
            continue
        slices, _, rest = vgpu_type.gpu_instance.profile.partition("g.")
        instance_gb = int(rest.partition("gb")[0])
        instances, left = divmod(vgpu_type.most, vgpu_type.gpu_instance.each)
        assert left == 0
        assert int(slices) == vgpu_type.profile.slices
        assert vgpu_type.profile.gb * vgpu_type.gpu_instance.each <= instance_gb
        # GPU instances have their memory in eighths, which names round up.
        assert instances * instance_gb <= card.framebuffer_mib / 1024 * 1.05


@pytest.mark.parametrize(
    ("device", "name", "most"),
    [
        ("10de:2236", "A10-4Q", 6),
        ("10de:2235", "A40-1Q", 32),
        ("10de:2335", "H200X-4C", 32),
        ("10de:2321", "H100L-15C", 6),
        ("10de:20b2", "A100DX-1-10CME", 1),
        ("10de:1eb8", "T4-1B", 16),
        ("10de:27b8", "L4-3B", 8),
        ("10de:2bb5", "DC-1-2Q", 48),
        ("10de:2bb5", "DC-16Q", 6),
        ("10de:2c3a", "DC-16Q", 2),
        ("10de:13bd", "M10-0B", 16),
        ("10de:13f2", "M60-2A", 4),
        ("10de:13f3", "M6-8Q", 1),
        ("10de:15f7", "P100C-4Q", 3),
        ("10de:15f8", "P100-8Q", 2),
        ("10de:15f9", "P100X-1B", 16),
        ("10de:1b38", "P40-3A", 8),
        ("10de:1b38", "P40-1Q", 24),
        ("10de:1bb3", "P4-2B", 4),
        ("10de:1bb4", "P6-16A", 1),
    ],
)
def test_documented_numbers(device: str, name: str, most: int) -> None:
    assert type_of(card_of(device), name).most == most


@pytest.mark.parametrize("gpu", ["M6", "M10", "M60", "P4", "P6", "P40", "P100", "P100C", "P100X"])
def test_maxwell_and_pascal_cards_have_the_types_that_sources_document(gpu: str) -> None:
    """They have no documented C-series, and only the host reports whether they mix sizes."""
    (card,) = catalog.cards_called(gpu)
    assert not card.is_mig
    assert {vgpu_type.profile.series for vgpu_type in card.types()} == {Series.A, Series.B, Series.Q}
    assert (card.mixed_sizes, {vgpu_type.most_mixed for vgpu_type in card.types()}) == (None, {None})
    (whole,) = (vgpu_type for vgpu_type in card.types() if vgpu_type.profile.series is Series.Q and vgpu_type.most == 1)
    assert whole.profile.framebuffer_mib == card.framebuffer_mib
    assert profile_name(f"GRID {whole.profile}") == whole.profile.text


def test_vgpu_counts_of_simulated_boards_match_the_catalog() -> None:
    seen = 0
    for board in shared_cards().values():
        for function in board.functions:
            for card in catalog.cards_of(parse_pci_id(function.id), None):
                for simulated_type in board.vgpu_types:
                    seen += 1
                    assert type_of(card, profile_name(simulated_type.name)).most == simulated_type.most
    assert seen > 30


def test_irregular_counts_belong_to_their_series() -> None:
    rtx8000 = card_of("10de:1e78", "10de:13d8")
    assert [type_of(rtx8000, name).most for name in ("RTX8000P-4Q", "RTX8000P-4C")] == [12, 8]


@pytest.mark.parametrize(
    ("device", "name", "mixed", "placements"),
    [
        ("10de:2236", "A10-4Q", 4, (0, 8, 12, 20)),
        ("10de:2235", "A40-16C", 2, None),
        ("10de:2230", "RTXA6000-16C", None, None),
        ("10de:1eb8", "T4-8Q", None, None),
    ],
)
def test_mixed_sizes(device: str, name: str, mixed: int | None, placements: tuple[int, ...] | None) -> None:
    found = type_of(card_of(device), name)
    assert (found.most_mixed, found.placements) == (mixed, placements)


@pytest.mark.parametrize(
    ("subsystem", "boards"),
    [
        (PciId(NVIDIA, 0x14A9), ["A16"]),
        (PciId(NVIDIA, 0x157E), ["A2"]),
        (PciId(NVIDIA, 0x0001), ["A16", "A2"]),
        (None, ["A16", "A2"]),
    ],
)
def test_subsystem_id_distinguishes_cards_of_one_device_id(subsystem: PciId | None, boards: list[str]) -> None:
    assert [card.product_name for card in catalog.cards_of(A16_A2, subsystem)] == boards


def test_a_card_with_its_own_device_id_is_found_by_any_subsystem_id() -> None:
    a10 = parse_pci_id("10de:2236")
    assert [card.gpu for card in catalog.cards_of(a10, None)] == ["A10"]
    assert [card.gpu for card in catalog.cards_of(a10, PciId(0x1028, 1))] == ["A10"]
    assert catalog.cards_of(parse_pci_id("10de:ffff"), None) == ()


@pytest.mark.parametrize(
    ("device", "name", "profile", "each"),
    [
        # NVIDIA's program uses the framebuffer as the GPU instance's size: 1g.2gb, which no card has.
        ("10de:2bb5", "DC-1-2Q", "1g.24gb+gfx", 12),
        ("10de:2bb5", "DC-1-2QGFX", "1g.24gb+gfx", 12),
        ("10de:2bb5", "DC-4-24Q", "4g.96gb+gfx", 4),
        ("10de:2bb5", "DC-1-24QNOME", "1g.24gb-me", 1),
        ("10de:2c3a", "DC-1-8C", "1g.16gb", 2),
        ("10de:20b0", "A100X-1-5C", "1g.5gb", 1),
        ("10de:20b0", "A100X-1-5CME", "1g.5gb+me", 1),
        ("10de:20b0", "A100X-1-10CMEALL", "1g.10gb+me.all", 1),
    ],
)
def test_gpu_instances(device: str, name: str, profile: str, each: int) -> None:
    found = card_of(device).gpu_instance(parse_profile(name))
    assert found is not None
    assert (found.profile, found.each) == (profile, each)


def test_time_sliced_and_unknown_types_have_no_gpu_instance() -> None:
    a100 = card_of("10de:20b0")
    assert [a100.gpu_instance(parse_profile(name)) for name in ("A100X-4C", "A100X-1-7C", "A100-1-5C")] == [None] * 3


def test_counts_of_types_on_the_same_gpu_instance_profile_add_up() -> None:
    desired_counts = {parse_profile("DC-1-24C"): 2, parse_profile("DC-1-24Q"): 1, parse_profile("DC-1-2QGFX"): 9}
    assert catalog.gpu_instances(card_of("10de:2bb5"), desired_counts) == {"1g.24gb+gfx": 4}
    assert catalog.gpu_instances(card_of("10de:2236"), {parse_profile("A10-4Q"): 6}) == {}


def test_which_cards_support_mig() -> None:
    assert card_of("10de:20b7").is_mig
    assert not card_of("10de:2236").is_mig
