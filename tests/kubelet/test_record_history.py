"""What a reading of the kubelet's record says after a reboot, and while the boot is unknown."""

from gpuvirt.facts.ids import BootId, DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.recordhistory import (
    MISSING,
    NEVER_WRITTEN,
    RESTARTED,
    History,
    Reading,
    RecordedDevice,
    observe,
)

BOOT, NEXT = BootId("0b1e0000-0000-4000-8000-000000000001"), BootId("0b1e0000-0000-4000-8000-000000000002")
POD, OTHER = PodUid("8a5c0001-0000-4000-8000-000000000001"), PodUid("8a5c0001-0000-4000-8000-000000000002")
DEVICE = RecordedDevice(POD, "main", ResourceName("nvidia.com/gpu"), DeviceId("GPU-8e1b1a2e"))
SEEN = History(BOOT, "kubelet-1", is_seen=True, devices=(DEVICE,))
PODS = frozenset({POD, OTHER})


def reading(
    devices: tuple[RecordedDevice, ...] | None, boot: BootId | None = BOOT, kubelet: str = "kubelet-2"
) -> Reading:
    return Reading(boot, devices, kubelet, kubelet, PODS)


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
    before = observe(History(None, "kubelet-1", is_seen=True, devices=(DEVICE,)), reading((), BOOT))
    assert (before.lost, before.boot_id) == ((DEVICE,), BOOT)


def test_a_second_loss_keeps_the_pods_that_were_in_doubt_before() -> None:
    other = RecordedDevice(OTHER, "main", DEVICE.resource, DeviceId("GPU-3b1b1a2e"))
    both = History(BOOT, "kubelet-1", is_seen=True, devices=(DEVICE, other))
    once = observe(both, reading((other,), kubelet="kubelet-2"))
    twice = observe(once, reading((), kubelet="kubelet-3"))
    assert twice.doubt is not None
    assert twice.doubt.pods == (POD, OTHER)
    assert set(twice.lost) == {DEVICE, other}
