"""State on disk: files of older, newer and first versions, truncated and damaged files, and the notes for users."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent.store import desiredstatestore, ledgerstore, originaldrivers
from gpuvirt.agent.store.checksummed import DigestField, Fields, FileLayout, HeaderLine
from gpuvirt.agent.store.persisted import Persisted, StoredState
from gpuvirt.agent.store.stateformat import Format, NewerVersionError, Stored
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.model.change.driverjournal import DriverJournal, StartedChange
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.plain import Plain
from tests.agent.node.keptstates import KEPT, LEDGER
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

GPU = PciAddress("0000:65:00.0")
RECORD = DriverJournal({GPU: "nvidia"}, {GPU: "vfio-pci"}, {GPU: StartedChange(True, "nvidia")}, BootId("b-1"))

# The bytes of files as the first versions wrote them; they are on users' disks.
FIRST_LEDGER = (
    b'{"version":1,"sha256":"37f824fc16f40f9b21b110618ad47df5d7eda2a18b92c45a0c69be6013f6c951"}\n'
    b'{"entries":[{"resource":"nvidia.com/GA102GL_A10","device":"0000:65:00.0","target":{"gpu":"0000:65:00.0",'
    b'"vgpu":null,"type":null},"group":12,"allocation":"allocate:1","since":"2026-01-01T00:00:00Z","consumer":'
    b'{"pod_uid":null,"namespace":"default","pod":"vm-a","container":"compute"},"misses":0,"earlier_boot":false},'
    b'{"resource":"nvidia.com/GRID_T4-8Q","device":"aaaaaaaa-0000-4000-8000-000000000001","target":{"gpu":'
    b'"0000:3b:00.0","vgpu":"aaaaaaaa-0000-4000-8000-000000000001","type":"GRID T4-8Q"},"group":null,"allocation":'
    b'"allocate:2","since":"2026-01-01T00:00:00Z","consumer":null,"misses":0,"earlier_boot":false}],"first_names":'
    b'{"10de:2236":"GA102GL_A10"},"resources":[],"type_names":{},"boot_id":null,"former":{"0000:65:00.0":{"consumer":'
    b'{"pod_uid":null,"namespace":"default","pod":"vm-b","container":null},"boot_id":"boot"}}}\n'
)
FIRST_DESIRED = (
    b'{"version":1,"sha256":"5eac98a2c3b0cc58b40ef56b8b6e6d39a97eb6d1c011830d794ffc0dc0ab3863"}\n'
    b'{"node":"node01","vgpu":{"config":{"value":"A10-4Q"},"configs":{"value":{"text":"version: v1\\n","where":'
    b'"ConfigMap gpuvirt/configs, key config.yaml","other_keys":null}},"workload":null,"spec":null},"good_configs":'
    b'{"text":"version: v1\\n","where":"ConfigMap gpuvirt/configs, key config.yaml","other_keys":null}}\n'
)
FIRST_DRIVERS = b'{\n "version": 1,\n "drivers": {\n  "0000:65:00.0": "nvidia"\n }\n}'
SECOND_DRIVERS = (
    b'{\n "version": 1,\n "drivers": {\n  "0000:65:00.0": "nvidia"\n },\n "overrides": {\n  "0000:65:00.0": '
    b'"vfio-pci"\n },\n "changes": {\n  "0000:65:00.0": {\n   "to_vfio": true,\n   "driver": "nvidia"\n  }\n },\n '
    b'"boot": "b-1"\n}'
)
"""A file with the fields that were added later in version 1."""


def test_files_of_the_first_versions_are_read() -> None:
    assert ledgerstore.decode(FIRST_LEDGER).value == LEDGER
    assert desiredstatestore.decode(FIRST_DESIRED).value == KEPT
    assert originaldrivers.parse(FIRST_DRIVERS) == DriverJournal({GPU: "nvidia"}, {GPU: "vfio-pci"})
    assert originaldrivers.parse(SECOND_DRIVERS) == RECORD


def first_reader(content: bytes) -> Fields:
    """Read two lines as the first version did; it moved aside a file that fails here."""
    head, _, rest = content.partition(b"\n")
    header = json.loads(head)
    assert header["version"] == 1
    assert sha256(rest.removesuffix(b"\n")).hexdigest() == header["sha256"]
    fields: Fields = json.loads(rest)
    return fields


def without(name: str, fields: Fields) -> Fields:
    """Return the fields of a ledger whose entries lack a field that the first version did not know, and keeps."""
    entries = fields["entries"]
    assert isinstance(entries, list)
    for entry in entries:
        assert isinstance(entry, dict)
        del entry[name]
    return fields


class FirstDrivers(msgspec.Struct, frozen=True):
    """The fields that the reader of version 1 read from `drivers.json`."""

    version: int
    drivers: dict[str, str]
    overrides: dict[str, str] | None = None
    changes: dict[str, dict[str, str | bool | None]] = {}
    boot: str | None = None
    damaged: bool = False


def test_the_first_versions_read_the_files_of_this_version(tmp_path: Path) -> None:
    ledger = without("allocated_s", first_reader(ledgerstore.encode(LEDGER)))
    assert ledger == first_reader(FIRST_LEDGER)
    desired = first_reader(desiredstatestore.encode(KEPT))
    vgpu = desired["vgpu"]
    assert isinstance(vgpu, dict)
    del vgpu["enforcement"], desired["enforcement"]  # the first version did not know these, and keeps them
    assert desired == first_reader(FIRST_DESIRED)
    originaldrivers.update(tmp_path / "drivers.json", lambda _: RECORD)
    found = msgspec.json.decode((tmp_path / "drivers.json").read_bytes(), type=FirstDrivers)
    assert (found.drivers, found.overrides, found.boot) == (RECORD.drivers, RECORD.overrides, RECORD.boot_id)
    assert found.changes == {GPU: {"to_vfio": True, "driver": "nvidia"}}


# A chain of three versions, as a state may grow.


@dataclass(frozen=True)
class Pod:
    name: str


class V1(msgspec.Struct, frozen=True):
    pod: str = ""


class V2(msgspec.Struct, frozen=True):
    pod: str = ""
    """The first of `pods`, which version 1 reads."""
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True)
class OwnedPod(Pod):
    owner: str = ""


@dataclass(frozen=True)
class V3:
    pod: str = ""
    pods: tuple[OwnedPod, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)


def pods_of(fields: Fields) -> Fields:
    """Return version 2: its first pod is the pod of version 1, the others are kept."""
    name, pods = fields.get("pod"), fields.get("pods", [])
    first: list[Plain] = [{"name": name}] if name else []
    return {**fields, "pods": [*first, *pods[1:]]} if isinstance(pods, list) else fields


LAYOUTS = pytest.mark.parametrize("layout", [HeaderLine(), DigestField()])


def chain(layout: FileLayout) -> tuple[Format[V1], Format[V2], Format[V3]]:
    return (
        Format(V1, layout),
        Format(V2, layout, (pods_of,)),
        Format(V3, layout, (pods_of, lambda fields: fields)),
    )


@LAYOUTS
def test_each_version_is_upgraded_to_the_next(layout: FileLayout) -> None:
    first, second, third = chain(layout)
    content = first.encode(V1("a"))
    assert second.decode(content).value == V2("a", (Pod("a"),))
    assert third.decode(content).value == V3("a", (OwnedPod("a"),))


@LAYOUTS
def test_an_older_version_reads_its_own_fields_and_keeps_the_others(layout: FileLayout) -> None:
    first, second, third = chain(layout)
    newest = V3("a", (OwnedPod("a", "x"), OwnedPod("b", "y")), {"zone": "1"})
    value, unknown = second.decode(third.encode(newest))
    assert value == V2("a", (Pod("a"), Pod("b")))
    assert third.decode(second.encode(value, unknown)).value == newest
    grown = replace(value, pods=(Pod("c"), *value.pods[1:]))
    assert third.decode(second.encode(grown, unknown)).value.pods == (OwnedPod("c"), OwnedPod("b", "y"))
    oldest, unknown = first.decode(third.encode(newest))
    after = third.decode(first.encode(replace(oldest, pod="c"), unknown)).value
    assert after == V3("c", (OwnedPod("c"), OwnedPod("b", "y")), {"zone": "1"})


def test_the_first_version_accepts_the_header_of_any_version() -> None:
    assert first_reader(chain(HeaderLine())[2].encode(V3("a")))["pod"] == "a"


@LAYOUTS
def test_a_newer_version_that_cannot_be_read_is_not_called_damaged(layout: FileLayout, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Changed:
        pod: int = 7

    newer = Format(Changed, layout, (pods_of,))
    with pytest.raises(NewerVersionError, match="its version is 2, but this gpuvirt only knows versions up to 1"):
        chain(layout)[0].decode(newer.encode(Changed()))
    file = Persisted(tmp_path / "state.json", chain(layout)[0], V1(), lost=V1("lost"))
    file.path.write_bytes(newer.encode(Changed()))
    file.update(lambda value: value)
    assert file.read() == StoredState(Stored(V1("lost")))
    assert newer.decode((tmp_path / "state.json.version2").read_bytes()).value == Changed()


@LAYOUTS
def test_a_version_below_1_is_refused(layout: FileLayout) -> None:
    with pytest.raises(DamagedError):
        chain(layout)[0].decode(
            layout.join({"pod": "a"}, 1).replace(b'"version":1', b'"version":0').replace(b": 1", b": 0")
        )


texts = st.text(max_size=5)
owned = st.builds(OwnedPod, texts, texts)
states = st.builds(V3, texts, st.lists(owned, max_size=3).map(tuple), st.dictionaries(texts, texts, max_size=3))


@given(states, st.sampled_from([HeaderLine(), DigestField()]))
def test_a_written_state_is_read_back(state: V3, layout: FileLayout) -> None:
    third = chain(layout)[2]
    value, unknown = third.decode(third.encode(state))
    assert value == state
    assert third.encode(value, unknown) == third.encode(state)


@LAYOUTS
def test_the_fields_of_a_file_are_those_that_were_written(layout: FileLayout) -> None:
    assert layout.split(layout.join({"pod": "a"}, 2)) == ({"pod": "a"}, 2)


@LAYOUTS
def test_fields_that_do_not_match_their_digest_are_refused(layout: FileLayout) -> None:
    with pytest.raises(DamagedError, match="its digest"):
        layout.split(layout.join({"pod": "a"}, 2).replace(b'"a"', b'"b"'))


FILES: list[tuple[Callable[[bytes], object], bytes]] = [
    (ledgerstore.decode, ledgerstore.encode(LEDGER)),
    (desiredstatestore.decode, desiredstatestore.encode(KEPT)),
    (originaldrivers.parse, originaldrivers.FORMAT.encode(originaldrivers.FORMAT.decode(SECOND_DRIVERS).value)),
    (chain(HeaderLine())[2].decode, chain(HeaderLine())[2].encode(V3("a", (OwnedPod("a", "x"),)))),
    (chain(DigestField())[2].decode, chain(DigestField())[2].encode(V3("a", (OwnedPod("a", "x"),)))),
]


@given(st.sampled_from(FILES), st.data())
def test_a_truncated_file_is_refused(file: tuple[Callable[[bytes], object], bytes], data: st.DataObject) -> None:
    decode, content = file
    length = data.draw(st.integers(0, len(content) - 2))  # the last byte is a line's end
    with pytest.raises(DamagedError):
        decode(content[:length])


@given(st.sampled_from(FILES), st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(
    file: tuple[Callable[[bytes], object], bytes], data: st.DataObject
) -> None:
    decode, content = file
    place, mask = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    damaged = bytearray(content)
    damaged[place] ^= mask
    try:
        assert decode(bytes(damaged)) == decode(content)
    except DamagedError:
        return


@given(st.sampled_from(FILES), st.binary(max_size=200))
@example(FILES[2], b"[]")
@example(FILES[2], b'{"version": 2, "drivers": {}}')
@example(FILES[2], b'{"version": 1, "drivers": 3}')
def test_arbitrary_bytes_are_refused(file: tuple[Callable[[bytes], object], bytes], content: bytes) -> None:
    with pytest.raises(DamagedError):
        file[0](content)


def test_an_update_is_written_before_it_returns_and_keeps_unknown_fields(tmp_path: Path) -> None:
    first, _, third = chain(DigestField())
    file = Persisted(tmp_path / "var/state.json", first, V1(), lost=V1("lost"))
    file.update(lambda value: replace(value, pod="a"))
    assert first.decode(file.path.read_bytes()).value == V1("a")
    file.path.write_bytes(third.encode(V3("a", (), {"zone": "1"})))
    file.update(lambda value: replace(value, pod="b"))
    assert third.decode(file.path.read_bytes()).value == V3("b", (OwnedPod("b"),), {"zone": "1"})


@pytest.mark.parametrize("content", [b"", b"\x00{", b"[]", SECOND_DRIVERS[:-9], b'{"version":1,"drivers":{"x":"y"}}'])
async def test_a_damaged_driver_record_is_moved_aside_and_reported(
    simulated: Simulated, tmp_path: Path, content: bytes
) -> None:
    record = tmp_path / "drivers.json"
    record.write_bytes(content)
    settings = Settings(mode=DesiredMode.PASSTHROUGH)
    async with running_node(simulated("2xA10"), tmp_path, settings) as node:
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST in {note.code for note in node.view.problems}
        originaldrivers.update(record, lambda before: before)
        assert (tmp_path / "drivers.json.damaged").read_bytes() == content
        assert originaldrivers.read(record).damaged
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST in {note.code for note in node.view.problems}
        originaldrivers.update(record, lambda before: replace(before, damaged=False))
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST not in {note.code for note in node.view.problems}
