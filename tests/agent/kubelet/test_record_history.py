"""The conclusions from a reading of the kubelet's record after a reboot, and while the boot is unknown."""

from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.recordhistory import (
    MISSING,
    NEVER_WRITTEN,
    RESTARTED,
    NamedDevice,
    PodRequests,
    RecordedDevice,
    RecordHistory,
    RecordReading,
    ask,
    name,
    observe,
)

BOOT, NEXT = BootId("0b1e0000-0000-4000-8000-000000000001"), BootId("0b1e0000-0000-4000-8000-000000000002")
POD, OTHER = PodUid("8a5c0001-0000-4000-8000-000000000001"), PodUid("8a5c0001-0000-4000-8000-000000000002")
DEVICE = RecordedDevice(POD, "main", ResourceName("nvidia.com/gpu"), DeviceId("GPU-8e1b1a2e"))
SEEN = RecordHistory(BOOT, "kubelet-1", is_seen=True, devices=(DEVICE,))
PODS = frozenset({POD, OTHER})


def reading(
    devices: tuple[RecordedDevice, ...] | None, boot: BootId | None = BOOT, kubelet: str = "kubelet-2"
) -> RecordReading:
    return RecordReading(boot, devices, kubelet, kubelet, PODS)


def test_a_device_that_a_restarted_kubelet_lacks_is_lost() -> None:
    found = observe(SEEN, reading(()))
    assert found.lost == (DEVICE,)
    assert found.doubt is not None
    assert (found.doubt.seen, found.doubt.pods) == (RESTARTED, (POD,))


def test_after_a_reboot_no_device_is_lost_though_the_folders_of_its_pods_remain() -> None:
    found = observe(SEEN, reading((), NEXT))
    assert (found.lost, found.doubt, found.boot_id) == ((), None, NEXT)
    missing = observe(SEEN, reading(None, NEXT))
    assert missing.lost == ()
    assert missing.doubt is not None
    assert missing.doubt.seen == NEVER_WRITTEN


def test_while_the_boot_is_unknown_what_was_recorded_stays_recorded() -> None:
    found = observe(SEEN, reading(None, None))
    assert (found.lost, found.boot_id) == ((DEVICE,), BOOT)
    assert found.doubt is not None
    assert found.doubt.seen == MISSING
    before = observe(RecordHistory(None, "kubelet-1", is_seen=True, devices=(DEVICE,)), reading((), BOOT))
    assert (before.lost, before.boot_id) == ((DEVICE,), BOOT)


def test_a_second_loss_keeps_the_pods_that_were_in_doubt_before() -> None:
    other = RecordedDevice(OTHER, "main", DEVICE.resource, DeviceId("GPU-3b1b1a2e"))
    both = RecordHistory(BOOT, "kubelet-1", is_seen=True, devices=(DEVICE, other))
    once = observe(both, reading((other,), kubelet="kubelet-2"))
    twice = observe(once, reading((), kubelet="kubelet-3"))
    assert twice.doubt is not None
    assert twice.doubt.pods == (POD, OTHER)
    assert set(twice.lost) == {DEVICE, other}


NAMED = NamedDevice("default", "vm", "compute", ResourceName("nvidia.com/A10"), DeviceId("0000:65:00.0"))


def missing_with(*named: NamedDevice, kubelet: str = "kubelet-1") -> RecordHistory:
    """Return the history after the record was lost, and the API of a kubelet has named devices."""
    return name(observe(SEEN, reading(None, kubelet="kubelet-1")), kubelet, named)


def test_a_device_that_only_the_api_named_is_lost_with_the_kubelet_that_knew_it() -> None:
    """The pod was admitted and the record deleted before it was read."""
    lost = observe(missing_with(NAMED), reading((DEVICE,)))
    assert (lost.named, lost.lost) == ((NAMED,), ())
    assert lost.doubt is not None


def test_a_device_that_a_record_had_is_lost_by_its_pods_uid() -> None:
    recorded = NamedDevice("default", "cuda", "main", *DEVICE.key)
    assert (missing_with(recorded).named, missing_with(recorded).lost) == ((), (DEVICE,))


def test_the_kubelet_that_knew_it_writes_it_again() -> None:
    again = observe(missing_with(NAMED), reading((DEVICE,), kubelet="kubelet-1"))
    assert (again.named, again.doubt) == ((), None)


def test_another_kubelet_or_no_loss_names_nothing() -> None:
    assert missing_with(NAMED, kubelet="kubelet-2").named == ()
    assert name(SEEN, "kubelet-1", [NAMED]).named == ()
    never = observe(RecordHistory(BOOT), reading(None))
    assert never.doubt is not None
    assert name(never, "", [NAMED]).named == ()


def test_while_the_kubelet_that_knew_it_answers_its_last_answer_counts() -> None:
    before = missing_with(NAMED)
    assert name(before, "kubelet-1", []).named == ()
    assert name(before, "kubelet-2", []).named == (NAMED,), "it has forgotten its pods"


def test_a_named_device_returns_with_its_entry_or_by_the_api_server() -> None:
    lost = observe(missing_with(NAMED), reading((DEVICE,)))
    other = RecordedDevice(OTHER, "compute", *NAMED.key)
    assert observe(lost, reading((DEVICE, other))).named == ()
    vm = PodRequests(OTHER, "default/vm", has_ended=False, resources=frozenset({("compute", NAMED.resource)}))
    cuda = PodRequests(POD, "default/cuda", has_ended=False, resources=frozenset({("main", DEVICE.resource)}))
    assert ask(lost, [vm, cuda], frozenset()).named == (NAMED,)
    ended = ask(lost, [replace(vm, has_ended=True), cuda], frozenset())
    assert (ended.named, ended.doubt) == ((), None)
