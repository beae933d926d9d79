"""The vGPUs that a config requests of a node's GPUs."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PciAddress, PciId, VgpuType, parse_pci_id
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet, read_config_set, resolve
from gpuvirt.model.desired import configchoice, vgpuconfig
from gpuvirt.model.desired.configchoice import ConfigGpu
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, DeviceFilter, NoteCode, Sizes
from gpuvirt.model.vgputypes.profiles import parse_profile
from tests.agent.vgpu import shipped

A10, T4, A2_A16, UNKNOWN = (parse_pci_id(f"10de:{device_id}") for device_id in ("2236", "1eb8", "25b6", "ffff"))


def gpus(*devices: PciId | ConfigGpu) -> list[ConfigGpu]:
    """Return GPUs of a node in the order of their addresses."""
    return [
        device if isinstance(device, ConfigGpu) else ConfigGpu(address(index), device, PciId(0x10DE, 1), index)
        for index, device in enumerate(devices)
    ]


def address(index: int) -> PciAddress:
    return PciAddress(f"0000:{index:02x}:00.0")


def entries(text: str) -> tuple[ConfigEntry, ...]:
    return vgpuconfig.parse(f"version: v1\nvgpu-configs: {{mine: [{text}]}}", where="f").configs["mine"]


def desired_types(text: str, *devices: PciId | ConfigGpu) -> tuple[Mapping[int, str], list[NoteCode]]:
    """Return the desired types of each GPU by its index, and the codes of the notes."""
    chosen = configchoice.desired(entries(text), gpus(*devices))
    types = {
        int(gpu[5:7], 16): " ".join(f"{vgpu_type}:{n}" for vgpu_type, n in desired_vgpus.types.items())
        for gpu, desired_vgpus in chosen.gpus.items()
    }
    return types, [note.code for note in chosen.notes]


A10_4Q = "{devices: all, vgpu-devices: {A10-4Q: 6}}"
T4_4Q = "{devices: all, vgpu-devices: {T4-4Q: 4}}"


@pytest.mark.parametrize(
    ("text", "devices", "types", "notes"),
    [
        (A10_4Q, [A10, A10], {0: "A10-4Q:6", 1: "A10-4Q:6"}, []),
        ("{devices: [0], vgpu-devices: {A10-4Q: 6}}", [A10, A10], {0: "A10-4Q:6"}, []),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 6}}, {devices: [1], vgpu-devices: {A10-8Q: 3}}",
            [A10, A10],
            {0: "A10-4Q:6", 1: "A10-8Q:3"},
            [],
        ),
        (
            "{devices: [1], vgpu-devices: {A10-8Q: 3}}, {devices: all, vgpu-devices: {A10-4Q: 6}}",
            [A10, A10],
            {0: "A10-4Q:6", 1: "A10-4Q:6"},
            [],
        ),
        ("{devices: all, vgpu-devices: {}}", [A10, UNKNOWN], {0: "", 1: ""}, []),
        ("{devices: all, device-filter: '0x223610DE', vgpu-devices: {A10-4Q: 1}}", [T4, A10], {1: "A10-4Q:1"}, []),
        ("{devices: [0], device-filter: '0x223610DE', vgpu-devices: {A10-4Q: 1}}", [A10, A10], {0: "A10-4Q:1"}, []),
        # On a mixed node, `all` means all cards that have the types.
        (A10_4Q, [A10, T4], {0: "A10-4Q:6"}, [NoteCode.OTHER_CARD]),
        (f"{A10_4Q}, {T4_4Q}", [A10, T4], {0: "A10-4Q:6", 1: "T4-4Q:4"}, []),
        # An entry that selects a GPU by index applies; the host reports later that the type is unavailable.
        ("{devices: [1], vgpu-devices: {A10-4Q: 6}}", [A10, T4], {1: "A10-4Q:6"}, []),
        # Of two entries for the same card the last counts, as in NVIDIA's program.
        (f"{A10_4Q}, {A10_4Q.replace('4Q: 6', '8Q: 3')}", [A10, UNKNOWN], {0: "A10-8Q:3", 1: "A10-8Q:3"}, []),
        ("{devices: [-1, 0], vgpu-devices: {A10-4Q: 6}}", [A10], {0: "A10-4Q:6"}, []),
        # A card that the catalog lacks may have these types.
        (A10_4Q, [UNKNOWN], {0: "A10-4Q:6"}, []),
        (f"{A10_4Q}, {T4_4Q}", [UNKNOWN], {}, [NoteCode.CARD_UNDECIDED]),
        ("{devices: [0, 7], vgpu-devices: {A10-4Q: 6}}", [A10], {0: "A10-4Q:6"}, [NoteCode.NO_SUCH_GPU]),
        ("{devices: [7], vgpu-devices: {A10-4Q: 6}}", [A10], {}, [NoteCode.NO_SUCH_GPU, NoteCode.NOTHING_MATCHES]),
        (
            "{devices: all, device-filter: '0x1EB810DE', vgpu-devices: {T4-4Q: 1}}",
            [A10],
            {},
            [NoteCode.NOTHING_MATCHES],
        ),
        (
            A10_4Q + ", {devices: all, device-filter: '0x3622 10DE', vgpu-devices: {A10-8Q: 1}}",
            [A10],
            {0: "A10-4Q:6"},
            [],
        ),
        (
            A10_4Q + ", {devices: all, device-filter: '0x362210DE', vgpu-devices: {A10-8Q: 1}}",
            [A10],
            {0: "A10-4Q:6"},
            [NoteCode.NOTHING_MATCHES],
        ),
        (
            A10_4Q + ", {devices: all, device-filter: '0x1EB810DE', vgpu-devices: {T4-8Q: 2}}",
            [A10],
            {0: "A10-4Q:6"},
            [],
        ),
        (A10_4Q, [], {}, []),
        (T4_4Q.replace("}}", "}, sizes: mixed}"), [T4], {0: "T4-4Q:4"}, [NoteCode.NEVER_MIXED]),
    ],
)
def test_types_and_notes_that_a_config_yields_for_a_node(
    text: str, devices: list[PciId], types: dict[int, str], notes: list[NoteCode]
) -> None:
    assert desired_types(text, *devices) == (types, notes)


def test_a_desired_state_has_every_field_of_its_entry() -> None:
    text = "{devices: all, vgpu-devices: {A10-4Q: 2}, scheduler: equal-share, sizes: equal}"
    (entry,) = entries(text)
    (desired_vgpus,) = configchoice.desired([entry], gpus(A10)).gpus.values()
    assert (desired_vgpus.scheduler, desired_vgpus.sizes, desired_vgpus.place) == (
        entry.scheduler,
        Sizes.EQUAL,
        "f:2: $.vgpu-configs.mine[0]",
    )


BOTH = ", ".join(
    f"{{device-filter: '0x25B610DE', devices: all, vgpu-devices: {{{name}: 2}}}}" for name in ("A16-8Q", "A2-8Q")
)


@pytest.mark.parametrize(
    ("subsystem", "types", "desired_type"),
    [
        (PciId(0x10DE, 0x14A9), (), "A16-8Q:2"),
        (PciId(0x10DE, 0x157E), (), "A2-8Q:2"),
        (PciId(0x1028, 0x0001), ("NVIDIA A16-1B",), "A16-8Q:2"),
        (PciId(0x1028, 0x0001), ("NVIDIA A2-1B", "NVIDIA A2-2Q"), "A2-8Q:2"),
        (None, ("NVIDIA A2-1B",), "A2-8Q:2"),
        (PciId(0x1028, 0x0001), (), None),
        (None, (), None),
        # The host's type names take precedence over the catalog's ids.
        (PciId(0x10DE, 0x14A9), ("NVIDIA A2-1B",), "A2-8Q:2"),
    ],
)
def test_cards_of_one_device_id_are_distinguished_by_subsystem_or_type_names(
    subsystem: PciId | None, types: tuple[str, ...], desired_type: str | None
) -> None:
    gpu = ConfigGpu(address(0), A2_A16, subsystem, 0, frozenset(VgpuType(vgpu_type) for vgpu_type in types))
    found, notes = desired_types(BOTH, gpu)
    assert found == ({0: desired_type} if desired_type else {})
    assert notes == ([] if desired_type else [NoteCode.CARD_UNDECIDED])


@pytest.mark.parametrize("path", shipped.sources(), ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("device", "subsystem", "desired_type"),
    [
        ("10de:25b6", "10de:14a9", "A16-8Q"),
        ("10de:25b6", "10de:157e", "A2-8Q"),
        ("10de:1e78", "10de:13d8", "RTX8000P-24Q"),
        ("10de:1e78", "10de:13d9", "RTX6000P-12Q"),
    ],
)
def test_nvidias_default_config_is_correct_on_cards_of_shared_device_ids(
    path: Path, device: str, subsystem: str, desired_type: str
) -> None:
    gpu = ConfigGpu(address(0), parse_pci_id(device), parse_pci_id(subsystem), 0)
    chosen = configchoice.desired(shipped.read(path)["default"], [gpu])
    assert chosen.gpus[gpu.address].types == {parse_profile(desired_type): 2}
    assert chosen.notes == ()


def test_a_board_that_no_filter_matches_is_reported() -> None:
    text = "{device-filter: '0x25B610DE:0x14A910DE', devices: all, vgpu-devices: {A16-8Q: 2}}, " + A10_4Q.replace(
        "all", "[1]"
    )
    gpu = ConfigGpu(address(0), A2_A16, PciId(0x1028, 7), 0)
    chosen = configchoice.desired(entries(text), [gpu, *gpus(gpu, A10)[1:]])
    assert list(chosen.gpus) == [address(1)]
    assert [note.code for note in chosen.notes] == [NoteCode.OTHER_BOARD]
    message = chosen.notes[0].message
    assert "the filters for its device id name other subsystems than its own, 1028:0007" in message


ENTRIES = st.builds(
    ConfigEntry,
    st.sampled_from([{}, {parse_profile("A10-4Q"): 1}, {parse_profile("T4-4Q"): 1}, {parse_profile("A16-4Q"): 1}]),
    st.none() | st.frozensets(st.integers(0, 4)),
    st.none() | st.frozensets(st.builds(DeviceFilter, st.sampled_from([A10, T4, A2_A16])), max_size=2),
)
GPUS = st.lists(st.sampled_from([A10, T4, A2_A16, UNKNOWN]), max_size=4).map(lambda devices: gpus(*devices))


@given(st.lists(ENTRIES, max_size=5), GPUS)
def test_the_last_matching_entry_decides_the_types_of_a_gpu(several: list[ConfigEntry], node: list[ConfigGpu]) -> None:
    chosen = configchoice.desired(several, node)
    for gpu in node:
        mine = [
            entry
            for entry in several
            if (entry.indices is None or gpu.index in entry.indices)
            and (entry.filters is None or any(f.device == gpu.device for f in entry.filters))
        ]
        desired_vgpus = chosen.gpus.get(gpu.address)
        if desired_vgpus is None:
            assert not mine or chosen.notes
            continue
        last = mine[-1]
        assert desired_vgpus.types in [entry.types for entry in mine if entry.picks_as(last)]
        if all(not entry.picks_as(last) for entry in mine[:-1]):
            assert desired_vgpus.types == last.types


@given(st.lists(ENTRIES, max_size=5), GPUS, st.data())
def test_the_desired_types_of_a_gpu_do_not_depend_on_other_gpus_or_their_order(
    several: list[ConfigEntry], node: list[ConfigGpu], data: st.DataObject
) -> None:
    every = configchoice.desired(several, node).gpus
    assert configchoice.desired(several, data.draw(st.permutations(node))).gpus == every
    for gpu in node:
        alone = configchoice.desired(several, [gpu]).gpus
        assert alone.get(gpu.address) == every.get(gpu.address)


def test_a_card_whose_types_are_unknown_is_undecided_and_not_invalid() -> None:
    text = ConfigText(f"version: v1\nvgpu-configs: {{mine: [{A10_4Q}, {T4_4Q}]}}", "f")
    config_set, config = (
        read_config_set(text, ConfigSet()),
        ConfigName("mine", Source(Origin.LABEL, "label nvidia.com/vgpu.config")),
    )
    later = resolve(config, config_set, gpus(UNKNOWN))
    assert (later.problem, [gpu.code for gpu in later.undecided]) == (None, [NoteCode.CARD_UNDECIDED])
    decided = resolve(config, config_set, gpus(A2_A16))
    assert decided.problem is not None
    assert decided.problem.where == "label nvidia.com/vgpu.config"
    assert resolve(config, config_set, gpus(T4, UNKNOWN)).undecided == ()
