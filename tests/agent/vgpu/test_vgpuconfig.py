"""vGPU configs: errors of NVIDIA's vgpu-device-manager are refused, entries that never match are reported by path."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import PciId
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, DeviceFilter, NoteCode, Sizes, parse_filter
from gpuvirt.model.vgputypes.profiles import Profile, Series, parse_profile

A10 = PciId(0x10DE, 0x2236)


def config(entry: str) -> str:
    return f"version: v1\nvgpu-configs:\n  mine:\n  - {entry}\n"


def entry_of(text: str) -> ConfigEntry:
    (entry,) = vgpuconfig.parse(config(text), where="f").configs["mine"]
    return entry


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vgpu-configs: {}", "f:1: $.version: expected 'v1', found None; write `version: v1`"),
        ("version: v2", "f:1: $.version: expected 'v1', found 'v2'"),
        ("version: 1", "f:1: $.version: expected text, found 1"),
        ("version: v1\nvgpu-configs: {}", "f:2: $.vgpu-configs: has no config"),
        ("version: v1\nvgpu-configs:", "f:2: $.vgpu-configs: has no config"),
        ("version: v1\nconfigs: {}", "f:2: $.configs: no such key; expected one of: version, vgpu-configs"),
        ("version: v1\nvgpu-configs:\n  a: []", "f:3: $.vgpu-configs.a: has no entry"),
        (config("devices: all"), "f:4: $.vgpu-configs.mine[0]: lacks the key vgpu-devices"),
        (config("vgpu-devices: {A10-4Q: 1}"), "f:4: $.vgpu-configs.mine[0]: lacks the key devices"),
        (config("{devices: some, vgpu-devices: {}}"), "f:4: $.vgpu-configs.mine[0].devices: expected `all` or a list"),
        (
            config("{devices: [a], vgpu-devices: {}}"),
            'f:4: $.vgpu-configs.mine[0].devices[0]: expected a whole number, found text "a"',
        ),
        (
            config("{devices: [0.5], vgpu-devices: {}}"),
            "f:4: $.vgpu-configs.mine[0].devices[0]: expected a whole number, found 0.5",
        ),
        (
            config("{devices: all, vgpu-devices: {A10-4Q: 0}}"),
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.A10-4Q: expected at least 1, found 0",
        ),
        (
            config("devices: all\n    vgpu-devices:\n      A10-4Q: 1\n      A10-4X: 2"),
            "f:7: $.vgpu-configs.mine[0].vgpu-devices.A10-4X: 'A10-4X' is not a vGPU type: expected CARD-GBs",
        ),
        (
            config("{devices: all, vgpu-devices: {A100-4C: 1, A100-1-5C: 1}}"),
            "f:4: $.vgpu-configs.mine[0].vgpu-devices: a GPU can't carry both time-sliced and MIG-backed types",
        ),
        (
            config("{devices: all, vgpu-devices: {}, device-filter: 0x223610DE}"),
            "f:4: $.vgpu-configs.mine[0].device-filter: expected text or a list, found 573968606",
        ),
        (config("{devices: all, vgpu-devices: {}, gpus: 1}"), "f:4: $.vgpu-configs.mine[0].gpus: no such key"),
        (
            config("{devices: all, vgpu-devices: {A10-4Q: 1}, scheduler: fair}"),
            "f:4: $.vgpu-configs.mine[0].scheduler: expected one of: best-effort, ",
        ),
        (
            config("{devices: all, vgpu-devices: {A10-4Q: 1}, scheduler: {policy: equal-share, timeslice-ms: 31}}"),
            "f:4: $.vgpu-configs.mine[0].scheduler: expected a timeslice-ms of 1 to 30, found 31",
        ),
        (
            config("{devices: all, vgpu-devices: {A10-4Q: 1}, scheduler: {policy: best-effort, timeslice-ms: 2}}"),
            "f:4: $.vgpu-configs.mine[0].scheduler: best-effort has no timeslice",
        ),
        (
            config("{devices: all, vgpu-devices: {A10-4Q: 1}, scheduler: fixed-share, sizes: mixed}"),
            "f:4: $.vgpu-configs.mine[0].scheduler: fixed-share needs vGPUs of one size",
        ),
        (
            config("{devices: all, vgpu-devices: {A100-1-5C: 1}, scheduler: fixed-share}"),
            "f:4: $.vgpu-configs.mine[0].scheduler: MIG-backed vGPUs do not share slices",
        ),
    ],
)
def test_an_invalid_config_is_refused_with_the_path_of_the_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        vgpuconfig.parse(text, where="f")
    assert str(error.value).startswith(message)


def test_an_error_among_many_configs_has_its_path() -> None:
    text = "version: v1\nvgpu-configs:\n" + "".join(
        f"  config{number}:\n  - devices: all\n    vgpu-devices: {{A10-4Q: {'x' if number == 300 else 1}}}\n"
        for number in range(400)
    )
    with pytest.raises(ConfigError) as error:
        vgpuconfig.parse(text, where="f")
    path = "$.vgpu-configs.config300[0].vgpu-devices.A10-4Q"
    assert str(error.value) == f'f:905: {path}: expected a whole number, found text "x"'


def test_messages_name_the_config_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config("{devices: all, vgpu-devices: {A10-4Q: 9}}"))
    (note,) = vgpuconfig.load(path).notes
    assert note.place == f"{path}:4: $.vgpu-configs.mine[0].vgpu-devices.A10-4Q"
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        vgpuconfig.load(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "# nothing", "version: v1", "{}"])
def test_files_without_configs(text: str) -> None:
    assert vgpuconfig.parse(text, where="f") == vgpuconfig.VgpuConfigs()


@pytest.mark.parametrize(
    ("text", "code", "reported"),
    [
        (
            "{devices: all, vgpu-devices: {A10-4Q: 1}, device-filter: '0x10DE2236'}",
            NoteCode.BAD_FILTER,
            "f:4: $.vgpu-configs.mine[0].device-filter: '0x10DE2236' matches no NVIDIA GPU; the vendor 10DE comes",
        ),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 1}, device-filter: '10de:2236'}",
            NoteCode.BAD_FILTER,
            "f:4: $.vgpu-configs.mine[0].device-filter: '10de:2236' is not a device filter: expected 0xDDDDVVVV",
        ),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 1}, device-filter: ['0x223610DE', '']}",
            NoteCode.BAD_FILTER,
            "f:4: $.vgpu-configs.mine[0].device-filter[1]: '' is not a device filter",
        ),
        (
            "{devices: [0, -1], vgpu-devices: {A10-4Q: 1}}",
            NoteCode.BAD_INDEX,
            "f:4: $.vgpu-configs.mine[0].devices[1]: there is no GPU -1",
        ),
        (
            "{devices: [], vgpu-devices: {A10-4Q: 1}}",
            NoteCode.BAD_INDEX,
            "f:4: $.vgpu-configs.mine[0].devices: names no",
        ),
        (
            "{devices: all, vgpu-devices: {A10-5Q: 1}}",
            NoteCode.UNKNOWN_TYPE,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.A10-5Q: gpuvirt's catalog has no type A10-5Q; there",
        ),
        (
            "{devices: all, vgpu-devices: {A1O-4Q: 1}}",
            NoteCode.UNKNOWN_TYPE,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.A1O-4Q: gpuvirt's catalog has no card A1O;",
        ),
        (
            "{devices: all, vgpu-devices: {XYZZY-4Q: 1}}",
            NoteCode.UNKNOWN_TYPE,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.XYZZY-4Q: gpuvirt's catalog has no card XYZZY;",
        ),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 7}}",
            NoteCode.TOO_MANY,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.A10-4Q: sets 7 on each GPU, but 6 fit on one (A10)",
        ),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 6}, sizes: mixed}",
            NoteCode.TOO_MANY,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices.A10-4Q: sets 6 on each GPU, but 4 of mixed sizes fit on",
        ),
        (
            "{devices: all, vgpu-devices: {A10-4Q: 1, A10-8Q: 1}}",
            NoteCode.SIZES_DIFFER,
            "f:4: $.vgpu-configs.mine[0].vgpu-devices: a GPU carries time-sliced vGPUs of one size at a time, but",
        ),
        ("{devices: all, vgpu-devices: {A10-4Q: 1, A10-8Q: 1}, sizes: mixed}", None, ""),
        ("{devices: all, vgpu-devices: {A10-4Q: 1, A10-4C: 1}}", None, ""),
        ("{devices: all, vgpu-devices: {DC-1-24QGFX: 1, DC-1-24Q: 1}}", None, ""),
        ("{devices: all, vgpu-devices: {A100-1-5C: 1, A100-2-10C: 1}}", None, ""),
        ("{devices: all, vgpu-devices: {}}", None, ""),
        ("{devices: all, vgpu-devices: }", None, ""),
    ],
)
def test_an_entry_that_never_matches_is_reported_and_the_config_is_accepted(
    text: str, code: NoteCode | None, reported: str
) -> None:
    read = vgpuconfig.parse(config(text), where="f")
    assert len(read.configs["mine"]) == 1
    assert [note.code for note in read.notes] == ([code] if code else [])
    assert all(note.text.startswith(reported) for note in read.notes)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("T4-5Q", "there are T4-1Q, T4-2Q, T4-4Q, T4-8Q, T4-16Q"),
        ("T4-3B", "there are T4-1B, T4-2B"),
        ("A100-2-5C", "there are A100-2-10C"),
        ("T4-1-4Q", "there are T4-1Q, T4-2Q, T4-4Q, T4-8Q, T4-16Q"),
        ("A100-4Q", "did you mean A100-4C?"),
        ("L40X-4Q", "did you mean L40?"),
        ("XYZZY-4Q", "a driver newer than gpuvirt may have it"),
    ],
)
def test_an_unknown_type_is_reported_with_suggestions(name: str, end: str) -> None:
    (note,) = vgpuconfig.parse(config(f"{{devices: all, vgpu-devices: {{{name}: 1}}}}"), where="f").notes
    assert note.message.startswith("gpuvirt's catalog has no ")
    assert note.message.endswith(f"; {end}")


def test_an_entry_with_mixed_sizes_lists_them() -> None:
    text = "{devices: all, vgpu-devices: {A10-12Q: 1, A10-4Q: 1, A10-0B: 1}}"
    notes = vgpuconfig.parse(config(text), where="f").notes
    assert any("but these have 512 MiB, 4 GB, 12 GB; use one size" in note.message for note in notes)


def test_fields_of_an_entry() -> None:
    assert entry_of(
        "{devices: [1, 0], device-filter: ['0x223610DE', '0x25B610DE:0x157E10DE'], vgpu-devices: {A10-4Q: 2},"
        " scheduler: {policy: fixed-share, timeslice-ms: 4}, sizes: equal}"
    ) == ConfigEntry(
        types={parse_profile("A10-4Q"): 2},
        indices=frozenset({0, 1}),
        filters=frozenset({DeviceFilter(A10), DeviceFilter(PciId(0x10DE, 0x25B6), PciId(0x10DE, 0x157E))}),
        scheduler=Scheduler(SchedulerPolicy.FIXED_SHARE, 4),
        sizes=Sizes.EQUAL,
        place="f:4: $.vgpu-configs.mine[0]",
    )
    assert entry_of("{devices: all, vgpu-devices: {A10-4Q: 2}, scheduler: equal-share}").scheduler == Scheduler(
        SchedulerPolicy.EQUAL_SHARE
    )


@pytest.mark.parametrize("filters", ["''", "[]", "~"])
def test_an_absent_filter_matches_every_gpu_and_a_malformed_filter_none(filters: str) -> None:
    assert entry_of(f"{{devices: all, vgpu-devices: {{}}, device-filter: {filters}}}").filters is None
    assert entry_of("{devices: all, vgpu-devices: {}, device-filter: '0x'}").filters == frozenset()


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("0x223610DE", A10),
        ("0X223610de", A10),
        ("573968606", A10),
        ("0x2236_10DE", A10),
        ("0b100010001101100001000011011110", A10),
        ("0o4215410336", A10),
        ("04215410336", A10),
        ("0x10DE", PciId(0x10DE, 0)),
        ("0", PciId(0, 0)),
    ],
)
def test_device_ids_are_parsed_as_go_writes_them(text: str, device: PciId) -> None:
    assert parse_filter(text) == DeviceFilter(device)
    assert parse_filter(f"{text}:{text}") == DeviceFilter(device, device)


NO_FILTERS = "x 0x 0x1223610DE 2236:10de 0x223610DE: :0x223610DE 0x1:0x2:0x3 -1 1__0 089 0x_ 1_ 0b2 \u0661"


@pytest.mark.parametrize("text", [*NO_FILTERS.split(), "", " 0x1", "0x1 ", "0x223610DE\n", "9" * 5000])
def test_text_that_is_no_device_filter_is_refused(text: str) -> None:
    with pytest.raises(InvalidIdError, match="is not a device filter"):
        parse_filter(text)


IDS = st.builds(PciId, st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
FILTERS = st.builds(DeviceFilter, IDS, st.none() | IDS)


@given(FILTERS, IDS, st.none() | IDS)
def test_a_written_filter_is_parsed_back_and_matches_its_device(
    one: DeviceFilter, device: PciId, subsystem: PciId | None
) -> None:
    assert parse_filter(one.text) == one
    assert one.matches(one.device, one.subsystem)
    assert one.matches(device, subsystem) == (one.device == device and one.subsystem in (None, subsystem))


@given(st.text(alphabet="0x1fbo_:9 ", max_size=20))
def test_any_text_parses_to_a_filter_or_is_refused(text: str) -> None:
    try:
        read = parse_filter(text)
    except InvalidIdError:
        return
    assert parse_filter(read.text) == read


SLICED = st.builds(
    Profile, st.sampled_from(["A10", "RTX6000-Ada"]), st.none(), st.integers(0, 96), st.sampled_from(Series)
)
MIG = st.builds(
    Profile, st.sampled_from(["A100", "6000D"]), st.integers(1, 9), st.integers(0, 96), st.sampled_from(Series)
)
SCHEDULERS = st.none() | st.sampled_from(
    [Scheduler(SchedulerPolicy.BEST_EFFORT), Scheduler(SchedulerPolicy.EQUAL_SHARE, 30)]
)
INDICES = st.none() | st.frozensets(st.integers(0, 9))
PICKED = st.none() | st.frozensets(FILTERS, min_size=1)
ENTRIES = st.one_of(
    st.builds(
        ConfigEntry,
        st.dictionaries(SLICED, st.integers(1, 99)),
        INDICES,
        PICKED,
        SCHEDULERS,
        st.none() | st.sampled_from(Sizes),
    ),
    st.builds(ConfigEntry, st.dictionaries(MIG, st.integers(1, 99)), INDICES, PICKED),
)
NAMES = st.text(min_size=1, max_size=12)


@given(st.dictionaries(NAMES, st.lists(ENTRIES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_written_configs_are_parsed_back(configs: dict[str, list[ConfigEntry]]) -> None:
    read = vgpuconfig.parse(vgpuconfig.written(configs), where="f").configs
    assert {
        name: [
            ConfigEntry(entry.types, entry.indices, entry.filters, entry.scheduler, entry.sizes) for entry in entries
        ]
        for name, entries in read.items()
    } == configs


def test_a_written_entry_with_malformed_filters_still_matches_no_gpu() -> None:
    text = vgpuconfig.written({"mine": [ConfigEntry({}, filters=frozenset())]})
    assert vgpuconfig.parse(text, where="f").configs["mine"][0].indices == frozenset()
