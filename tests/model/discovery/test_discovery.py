"""The labels of a host: GPUs and system, unknown facts without labels, and valid label values."""

import re
from errno import EACCES, EIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.snapshot import Discovery
from gpuvirt.hardware.discovery import OS_RELEASE, discover
from gpuvirt.model.inventory import osrelease
from gpuvirt.model.inventory.osrelease import OsRelease
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL, Labels, label_value, labels_of
from gpuvirt.paths import HostPath
from gpuvirt_sim.hostspec import host_names
from tests.sim.simulated import Simulated

A10S = (PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0"))
DEVICES = HostPath("/sys/bus/pci/devices")
NOT_NVIDIAS = {"2xFlex170", "2xW7900", "8xMI300X"}
READ = ("vendor", "class")
NVSWITCH_CLASS = b"0x068000\n"

VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""A non-empty label value, as Kubernetes checks it."""


@pytest.mark.parametrize("name", host_names())
def test_hosts_with_nvidias_gpus_are_detected(simulated: Simulated, name: str) -> None:
    assert discover(simulated(name)).gpu is (name not in NOT_NVIDIAS)


def test_a_scan_reads_only_ids_and_os_release(simulated: Simulated) -> None:
    kernel = simulated("8xA100")
    discover(kernel)
    ids = {HostPath(f"{DEVICES}/{name}/{what}") for name in kernel.listdir(DEVICES) for what in READ}
    assert kernel.reads <= ids | {OS_RELEASE}
    assert kernel.writes == []


def test_nvswitches_and_audio_functions_are_no_gpus(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    for address in A10S:
        kernel.faults.answer(HostPath(f"{DEVICES}/{address}/class"), NVSWITCH_CLASS)
    assert discover(kernel).gpu is False


@pytest.mark.parametrize("path", [DEVICES, *(HostPath(f"{DEVICES}/{A10S[0]}/{name}") for name in READ)])
def test_an_unreadable_function_makes_the_gpu_label_unknown(simulated: Simulated, path: HostPath) -> None:
    kernel = simulated("2xA10")
    kernel.unplug(A10S[1])
    kernel.faults.fail(path, EACCES)
    seen = discover(kernel)
    assert (seen.gpu, seen.unread) == (None, (Unread(path, errno=EACCES),))
    assert PRESENT_LABEL not in labels_of(seen, before=seen)


def test_a_single_readable_gpu_sets_the_label(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    kernel.faults.fail(HostPath(f"{DEVICES}/{A10S[0]}/vendor"), EIO)
    assert discover(kernel).gpu is True


def test_the_gpu_label_is_unknown_without_the_pci_folder(simulated: Simulated) -> None:
    """A container without a mount of /sys."""
    kernel = simulated("2xA10")
    kernel.tree.remove(DEVICES)
    assert discover(kernel).gpu is None


def discovery(gpu: bool | None, text: str | None = None) -> Discovery:
    return Discovery(gpu, Attribute(OS_RELEASE, text))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, True, {PRESENT_LABEL: "true"}),
        (False, True, {PRESENT_LABEL: "true"}),
        (None, False, {}),
        (True, False, {}),
        (False, False, {PRESENT_LABEL: None}),
        (False, None, {}),
        (True, None, {}),
    ],
)
def test_a_gpu_is_reported_at_once_and_its_absence_after_two_scans(
    before: bool | None, now: bool | None, expected: Labels
) -> None:
    assert labels_of(discovery(now), discovery(before)) == expected
    assert labels_of(discovery(False), None) == {}, "the first scan after a start may be during a reset"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('NAME="Ubuntu"\nVERSION_ID="22.04"\nID=ubuntu\n', ("ubuntu", "22.04")),
        ("ID='rhcos'\nVERSION_ID='4.16'\n", ("rhcos", "4.16")),
        ("ID=arch\n", ("arch", None)),
        ("", ("linux", None)),
        ("ID=\nVERSION_ID=\n", ("linux", None)),
        ("# ID=other\nID=debian\nID=ubuntu\n", ("ubuntu", None)),
        ('VERSION_ID="15.5 \\"SP\\""\nID="opensuse-leap"', ("opensuse-leap", "15.5__SP")),
        ("ID=alpine\nVERSION_ID=3.23.0_alpha20250612", ("alpine", "3.23.0_alpha20250612")),
    ],
)
def test_the_system_labels_have_the_values_of_os_release(text: str, expected: tuple[str, str | None]) -> None:
    labels = labels_of(discovery(None, text), None)
    assert (labels[OS_ID_LABEL], labels[OS_VERSION_LABEL]) == expected


@pytest.mark.parametrize("number", [None, EACCES])
def test_the_system_labels_stay_while_os_release_cannot_be_read(simulated: Simulated, number: int | None) -> None:
    kernel = simulated("2xA10")
    if number is None:
        kernel.tree.remove(OS_RELEASE)
    else:
        kernel.faults.fail(OS_RELEASE, number)
    seen = discover(kernel)
    assert labels_of(seen, None) == {PRESENT_LABEL: "true"}
    assert [entry.path for entry in seen.unread] == [OS_RELEASE]


@given(st.text(max_size=100))
def test_arbitrary_text_gives_a_valid_label_value_or_none(text: str) -> None:
    value = label_value(text)
    assert value is None or VALUE.fullmatch(value)
    assert (value is None) == (not re.search("[A-Za-z0-9]", re.sub(r"[^A-Za-z0-9_.-]", "_", text)))


@given(st.from_regex(VALUE, fullmatch=True))
def test_a_valid_label_value_stays_unchanged(text: str) -> None:
    assert label_value(text) == text


@given(st.text(max_size=200))
def test_arbitrary_os_release_gives_valid_labels(text: str) -> None:
    labels = labels_of(discovery(True, text), None)
    assert all(value is None or VALUE.fullmatch(value) for value in labels.values())


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), min_size=1, max_size=20)


@given(plain, plain)
def test_quoted_values_are_read_as_by_the_shell(system: str, version: str) -> None:
    def quoted(text: str) -> str:
        return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'

    assert osrelease.parse(f"ID={quoted(system)}\nVERSION_ID={quoted(version)}\n") == OsRelease(system, version)
