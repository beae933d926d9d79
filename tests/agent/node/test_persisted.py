"""State on disk: one contract of all files, with those of version 0.1, damaged, truncated and of a newer version."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent.shares import sharefiles
from gpuvirt.agent.store import agentstate, hostfiles
from gpuvirt.agent.store.persisted import Persisted, StoredState
from gpuvirt.agent.store.stateformat import (
    DigestField,
    Fields,
    FileLayout,
    Format,
    HeaderLine,
    NewerVersionError,
    Stored,
)
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import BootId, DeviceId, PciAddress, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.allocation.recordhistory import Doubt, RecordedDevice, RecordHistory
from gpuvirt.model.allocation.tenancy import Record, Tenancies, TenantKind, tenant
from gpuvirt.model.change.state import DriverJournal, StartedChange
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.demand import ContainerKind, ContainerName, Units
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareLimit, ShareRecords
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.plain import Plain
from tests.agent.node.keptstates import A10, KEPT, LEDGER
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

BOOT, GPU, POD = BootId("b-1"), PciAddress("0000:65:00.0"), PodUid("u-1")
JOURNAL = DriverJournal({GPU: "nvidia"}, {GPU: "vfio-pci"}, {GPU: StartedChange(True, "nvidia")}, BOOT)
VM = tenant(TenantKind.VM, Consumer(namespace="default", pod="vm-a", container="compute"))
TENANTS = Tenancies(BOOT, True, {GPU: Record(VM, TenantKind.VM, "GPU-1")}, (POD,))
LOST = RecordedDevice(PodUid("u-2"), "compute", ResourceName(A10), DeviceId("0000:ca:00.0"))
HISTORY = RecordHistory(
    BOOT,
    "k-1",
    is_seen=True,
    is_missing=True,
    devices=(RecordedDevice(POD, "compute", ResourceName(A10), DeviceId(GPU)),),
    lost=(LOST,),
    doubt=Doubt("the record is missing", (LOST.pod,), "k-1"),
)
SHARE = ContainerRecord(ContainerKind.APP, Units(500), {GpuId("GPU-1"): Units(500)}, "5d41402a", ShareLimit(11264, 50))
SHARES = ShareRecords({POD: PodRecord("default", "trainer", {ContainerName("main"): SHARE})})

T = TypeVar("T")


class Store(NamedTuple):
    """A file, with a state of it."""

    state: object
    decode: Callable[[bytes], Stored[object]]
    encode: Callable[[Fields], bytes]
    """Returns the file with the state, and with fields of a newer version."""
    layout: FileLayout


def store(form: Format[T], state: T) -> Store:
    return Store(
        state,
        lambda content: Stored[object](*form.decode(content)),
        lambda fields: form.encode(state, fields),
        form.layout,
    )


STORES = {
    "ledger.json": store(agentstate.LEDGER, LEDGER),
    "desired.json": store(agentstate.DESIRED, KEPT),
    "kubelet-record.json": store(agentstate.HISTORY, HISTORY),
    "drivers.json": store(hostfiles.JOURNAL_FORMAT, JOURNAL),
    "tenancy.json": store(hostfiles.TENANCIES_FORMAT, TENANTS),
    "shares.json": store(sharefiles.FORMAT, SHARES),
}
OF_VERSION_01 = Path(__file__).parent / "version-0.1"
"""The same states as version 0.1.0 has written them: such files are on users' disks."""
DRIVERS = hostfiles.JOURNAL_FORMAT.encode(JOURNAL)
EACH_STORE = pytest.mark.parametrize("name", STORES)


@EACH_STORE
def test_a_file_of_version_01_is_read(name: str) -> None:
    assert STORES[name].decode((OF_VERSION_01 / name).read_bytes()) == (STORES[name].state, {})


def fields_by_01(content: bytes) -> Fields:
    """Read a file as version 0.1 does; it puts aside a file that fails here."""
    fields: Fields
    if content.startswith(b"{\n"):
        checked, digest, _ = re.split(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z', content)
        assert sha256(checked).hexdigest().encode() == digest
        fields = json.loads(content)
        return {name: value for name, value in fields.items() if name != "sha256"}
    head, _, rest = content.partition(b"\n")
    header = json.loads(head)
    assert header == {"version": 1, "sha256": sha256(rest.removesuffix(b"\n")).hexdigest()}
    fields = json.loads(rest)
    return fields


def contains(fields: Plain, others: Plain) -> bool:
    """Return whether all fields of others are in `fields`, with the same values."""
    if isinstance(fields, dict) and isinstance(others, dict):
        return all(name in fields and contains(fields[name], value) for name, value in others.items())
    if isinstance(fields, list) and isinstance(others, list):
        return len(fields) == len(others) and all(map(contains, fields, others))
    return fields == others


@EACH_STORE
def test_version_01_reads_the_files_of_this_version(name: str) -> None:
    """Only the tenants in the ledger are gone, which version 0.1 has in `tenancy.json`, too."""
    earlier = fields_by_01((OF_VERSION_01 / name).read_bytes())
    earlier.pop("former", None)
    assert contains(fields_by_01(STORES[name].encode({})), earlier)


@EACH_STORE
def test_a_written_state_is_read_back_with_the_fields_of_a_newer_version(name: str) -> None:
    content = STORES[name].encode({"plans": {"a": 1}})
    assert STORES[name].decode(content) == (STORES[name].state, {"plans": {"a": 1}})


@given(st.sampled_from(sorted(STORES)), st.data())
def test_a_truncated_file_is_refused(name: str, data: st.DataObject) -> None:
    content = STORES[name].encode({})
    length = data.draw(st.integers(0, len(content) - 2))  # the last byte is a line's end
    with pytest.raises(DamagedError):
        STORES[name].decode(content[:length])


@given(st.sampled_from(sorted(STORES)), st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(name: str, data: st.DataObject) -> None:
    damaged = bytearray(STORES[name].encode({}))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert STORES[name].decode(bytes(damaged)).value == STORES[name].state  # white space, or a version
    except DamagedError:
        return


@given(st.sampled_from(sorted(STORES)), st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(name: str, content: bytes) -> None:
    with pytest.raises(DamagedError):
        STORES[name].decode(content)


@EACH_STORE
def test_a_file_of_another_shape_or_of_an_earlier_version_is_refused(name: str) -> None:
    layout = STORES[name].layout
    fields, version = layout.split(STORES[name].encode({}))
    with pytest.raises(DamagedError, match=f"its version is {version - 1}; expected {version}"):
        STORES[name].decode(layout.join(fields, version - 1))
    with pytest.raises(DamagedError, match="its content is invalid"):
        STORES[name].decode(layout.join(dict.fromkeys(fields, 3.5), version))
    for content in (b"[]", b'{"version": 2, "drivers": {}}', b'{"version": 1, "drivers": {}}'):
        with pytest.raises(DamagedError):
            STORES[name].decode(content)


LAYOUTS = pytest.mark.parametrize("layout", [HeaderLine(), DigestField()])


@LAYOUTS
def test_the_fields_of_a_file_are_those_that_were_written(layout: FileLayout) -> None:
    assert layout.split(layout.join({"pod": "a"}, 2)) == ({"pod": "a"}, 2)


@LAYOUTS
def test_fields_that_do_not_match_their_digest_are_refused(layout: FileLayout) -> None:
    with pytest.raises(DamagedError, match="its digest"):
        layout.split(layout.join({"pod": "a"}, 2).replace(b'"a"', b'"b"'))


class Pod(msgspec.Struct, frozen=True):
    pod: str = ""


@LAYOUTS
def test_a_newer_version_that_cannot_be_read_is_not_called_damaged(layout: FileLayout, tmp_path: Path) -> None:
    newer = layout.join({"pod": 7}, 2)
    with pytest.raises(NewerVersionError, match="its version is 2, but this gpuvirt only knows versions up to 1"):
        Format(Pod, layout).decode(newer)
    file = Persisted(tmp_path / "state.json", Format(Pod, layout), Pod(), lost=Pod("lost"))
    file.path.write_bytes(newer)
    file.update(lambda value: value)
    assert file.read() == StoredState(Stored(Pod("lost")))
    assert (tmp_path / "state.json.version2").read_bytes() == newer


@LAYOUTS
def test_an_update_is_written_before_it_returns_and_keeps_unknown_fields(layout: FileLayout, tmp_path: Path) -> None:
    file = Persisted(tmp_path / "var/state.json", Format(Pod, layout), Pod(), lost=Pod("lost"))
    file.update(lambda value: value)
    assert layout.split(file.path.read_bytes()) == ({"pod": ""}, 1), "the file exists, although nothing was changed"
    assert file.update(lambda value: replace(value, pod="a")) == file.value == Pod("a")
    file.path.write_bytes(layout.join({"pod": "a", "zone": "1"}, 2))
    file.update(lambda value: replace(value, pod="b"))
    assert layout.split(file.path.read_bytes()) == ({"pod": "b", "zone": "1"}, 1)


@pytest.mark.parametrize("content", [b"", b"\x00{", b"[]", DRIVERS[:-9], b'{"version":1,"drivers":{"x":"y"}}'])
async def test_a_damaged_driver_record_is_moved_aside_and_reported(
    simulated: Simulated, tmp_path: Path, content: bytes
) -> None:
    record = tmp_path / "drivers.json"
    record.write_bytes(content)
    settings = Settings(mode=DesiredMode.PASSTHROUGH)
    async with running_node(simulated("2xA10"), tmp_path, settings) as node:
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST in {note.code for note in node.view.problems}
        hostfiles.journal(record).update(lambda before: before)
        assert (tmp_path / "drivers.json.damaged").read_bytes() == content
        assert hostfiles.journal(record).value.damaged
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST in {note.code for note in node.view.problems}
        hostfiles.journal(record).update(lambda before: replace(before, damaged=False))
        await node.advance(30)
        assert ReasonCode.DRIVERS_LOST not in {note.code for note in node.view.problems}
