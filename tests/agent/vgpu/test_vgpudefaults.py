"""The built-in configs are correct on every card, and a superset of NVIDIA's configs."""

from pathlib import Path

import msgspec
import pytest
import yaml

from gpuvirt.facts.ids import PciAddress, PciId, parse_pci_id
from gpuvirt.model.desired import configchoice, vgpuconfig
from gpuvirt.model.desired.configchoice import ConfigGpu
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, builtin_configs
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import parse_profile
from tests.agent.vgpu import shipped
from tests.cli.commandline import called

BUILTIN = builtin_configs()
RTX_PRO_6000, RTX_PRO_4500 = parse_pci_id("10de:2bb5"), parse_pci_id("10de:2c3a")
ADDRESS = PciAddress("0000:65:00.0")

SHARED_IDS = {parse_pci_id("10de:25b6"), parse_pci_id("10de:1e78")}
"""Ids of two cards each; NVIDIA's `default` has two entries for each, of which one fails on any board (V6)."""


def desired(name: str, device: PciId, subsystem: PciId | None = None) -> dict[str, int] | None:
    gpu = ConfigGpu(ADDRESS, device, subsystem, 0)
    desired_vgpus = configchoice.desired(BUILTIN[name], [gpu]).gpus.get(ADDRESS)
    return {profile.text: count for profile, count in desired_vgpus.types.items()} if desired_vgpus else None


@pytest.mark.parametrize("path", shipped.sources(), ids=lambda path: path.name)
def test_every_config_that_nvidia_ships_is_built_in(path: Path) -> None:
    theirs = shipped.read(path)
    assert len(theirs) == 711
    assert set(theirs) <= set(BUILTIN)
    for name in set(theirs) - {"default"}:
        (entry,) = theirs[name]
        if not name.startswith("DC-"):
            assert [(builtin.types, builtin.is_for_all) for builtin in BUILTIN[name]] == [(entry.types, True)], name


@pytest.mark.parametrize("path", shipped.sources(), ids=lambda path: path.name)
def test_a_type_name_of_two_cards_has_a_count_for_each_card(path: Path) -> None:
    """Two cards have types called DC. NVIDIA has the larger card's count; gpuvirt has a count for each card."""
    theirs = {name: entries for name, entries in shipped.read(path).items() if name.startswith("DC-")}
    assert len(theirs) == 75
    for name, (entry,) in theirs.items():
        large, small = (desired(name, device) for device in (RTX_PRO_6000, RTX_PRO_4500))
        (theirs_count,) = entry.types.values()
        assert (large or small) == {name: theirs_count}, name


@pytest.mark.parametrize(
    ("name", "large", "small"),
    [("DC-16Q", 6, 2), ("DC-1-8C", 12, 4), ("DC-24Q", 4, None), ("DC-1-16Q", None, 2), ("DC-1-8CGFX", 12, None)],
)
def test_counts_of_the_two_cards_with_dc_types(name: str, large: int | None, small: int | None) -> None:
    assert desired(name, RTX_PRO_6000) == ({name: large} if large else None)
    assert desired(name, RTX_PRO_4500) == ({name: small} if small else None)


@pytest.mark.parametrize("path", shipped.sources(), ids=lambda path: path.name)
def test_the_default_config_equals_nvidias_except_for_shared_device_ids(path: Path) -> None:
    theirs = shipped.read(path)["default"]
    assert len(theirs) == 56
    for entry in theirs:
        device = next(device_filter.device for device_filter in entry.filters or ())
        if device not in SHARED_IDS:
            assert desired("default", device) == {profile.text: n for profile, n in entry.types.items()}


@pytest.mark.parametrize(
    ("device", "subsystem", "name"),
    [
        ("10de:25b6", "10de:14a9", "A16-8Q"),
        ("10de:25b6", "10de:157e", "A2-8Q"),
        ("10de:1e78", "10de:13d8", "RTX8000P-24Q"),
        ("10de:1e78", "10de:13d9", "RTX6000P-12Q"),
        ("10de:2236", "10de:1482", "A10-12Q"),
        ("10de:15f8", "10de:0001", "P100-8Q"),
        ("10de:13bd", "10de:0001", "M10-4Q"),
        ("10de:1db4", "10de:1214", "V100-8Q"),
        ("10de:1eb8", "10de:12a2", "T4-8Q"),
    ],
)
def test_the_default_is_two_of_half_the_framebuffer(device: str, subsystem: str, name: str) -> None:
    assert desired("default", parse_pci_id(device), parse_pci_id(subsystem)) == {name: 2}


@pytest.mark.parametrize("name", ["GRID P100-8Q", "GRID_P100-8Q", "grid_p100-8q", "p100-8q"])
def test_a_config_name_spelled_as_on_a_host_or_in_vsphere_gets_a_suggestion(name: str) -> None:
    assert name not in BUILTIN
    assert nearest(name, BUILTIN) == "P100-8Q"


def test_the_default_has_exactly_one_entry_for_each_card_and_no_gpu_has_two() -> None:
    for card in catalog.cards():
        for card_id in card.ids:
            gpu = ConfigGpu(ADDRESS, card_id.device, card_id.subsystem, 0)
            mine = [
                entry
                for entry in BUILTIN["default"]
                if any(each.matches(gpu.device, gpu.subsystem) for each in entry.filters or ())
            ]
            assert len(mine) == 1, card.product_name
            (profile,) = mine[0].types
            assert profile.gpu == card.gpu


def test_every_named_config_fills_each_card_that_has_the_type() -> None:
    for card in catalog.cards():
        for vgpu_type in card.types():
            for profile in (vgpu_type.profile, *vgpu_type.spelled):
                for ids in card.ids:
                    assert desired(profile.text, ids.device, ids.subsystem) == {profile.text: vgpu_type.most}


@pytest.mark.parametrize("name", ["A10-5Q", "A10", "", "Default", "DC-1-24QNOME", "A10-4Q ", "XX-4Q"])
def test_names_that_are_no_builtin_config(name: str) -> None:
    assert name not in BUILTIN
    with pytest.raises(KeyError):
        BUILTIN[name]


def test_builtin_configs_behave_as_a_mapping() -> None:
    assert len(BUILTIN) == len(set(BUILTIN)) == 1102
    assert next(iter(BUILTIN)) == "default"


def _bare(entries: tuple[ConfigEntry, ...]) -> list[ConfigEntry]:
    return [ConfigEntry(entry.types, entry.indices, entry.filters) for entry in entries]


def test_default_config_prints_all_builtin_configs() -> None:
    printed = called("vgpu", "default-config")
    assert (printed.returncode, printed.stderr) == (0, b"")
    read = vgpuconfig.parse(printed.stdout.decode(), where="printed")
    assert read.notes == ()
    assert {name: _bare(entries) for name, entries in read.configs.items()} == {
        name: _bare(entries) for name, entries in BUILTIN.items()
    }


class OriginalEntry(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """An entry as vgpu-device-manager defines it; it refuses unknown fields."""

    devices: str
    vgpu_devices: dict[str, int]
    device_filter: str | list[str] = ""


class OriginalFile(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    version: str
    vgpu_configs: dict[str, list[OriginalEntry]]


def test_nvidias_device_manager_parses_the_printed_configs_with_one_entry_a_board() -> None:
    text = called("vgpu", "default-config").stdout.decode()
    # NVIDIA's program reads YAML 1.1, as PyYAML does.
    read = msgspec.convert(yaml.safe_load(text), OriginalFile)
    assert read.version == "v1"
    assert all(entry.devices == "all" for entries in read.vgpu_configs.values() for entry in entries)
    for entries in read.vgpu_configs.values():
        filters = [
            [entry.device_filter] if isinstance(entry.device_filter, str) else entry.device_filter for entry in entries
        ]
        flat = [text for several in filters for text in several]
        assert len(flat) == len(set(flat))
        assert len(entries) == 1 or "" not in flat
        assert all(text.startswith("0x") for text in flat if text)


def test_default_config_prints_a_single_config_by_name() -> None:
    printed = called("vgpu", "default-config", "--name", "A10-4Q")
    assert yaml.safe_load(printed.stdout) == {
        "version": "v1",
        "vgpu-configs": {"A10-4Q": [{"devices": "all", "vgpu-devices": {"A10-4Q": 6}}]},
    }


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A10-4X", "did you mean A10-4A?"),
        ("x", "prints them all"),
        ("A10-5Q", "; the types of A10 are A10-1Q, A10-2Q, A10-3Q, A10-4Q, A10-6Q, A10-8Q, A10-12Q, A10-24Q\n"),
        ("T4-1ME", "did you mean T4-1A?"),
        ("XX-4Q", "prints them all"),
    ],
)
def test_an_unknown_config_name_is_reported_with_a_suggestion(name: str, hint: str) -> None:
    printed = called("vgpu", "default-config", "--name", name)
    assert printed.returncode == 2
    assert f"there is no built-in config {name}" in printed.stderr.decode()
    assert hint in printed.stderr.decode()
    assert parse_profile("A10-4A").text in BUILTIN
