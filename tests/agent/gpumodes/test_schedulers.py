"""The refusal of schedulers, and the modprobe file that keeps schedulers when the driver is loaded again."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.cli.changes.vgpu import write_module_options
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PciAddress, PciId, VgpuType
from gpuvirt.facts.pci import AMD, NVIDIA, PciFunction, Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.facts.vgpu import Framework, GpuModes, Scheduler, SchedulerPolicy, VgpuHost
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.change.moduleoption import FILE, HEAD, conflicting_options, merge
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.scheduling import refuse, registry_value, scheduler_context_of
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath, HostRoots

GPU, OTHER = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
BEST, EQUAL, FIXED = SchedulerPolicy.BEST_EFFORT, SchedulerPolicy.EQUAL_SHARE, SchedulerPolicy.FIXED_SHARE
ODD = Unread(HostPath("/usr/bin/nvidia-smi"), seen="?")


@pytest.mark.parametrize(
    ("modes", "desired", "expected"),
    [
        (GpuModes(GPU), Scheduler(EQUAL), None),
        (GpuModes(GPU, mixed_sizes=False, mig=False), Scheduler(FIXED, 30), None),
        (GpuModes(GPU, mixed_sizes=True), Scheduler(EQUAL, 1), None),
        (GpuModes(GPU, mixed_sizes=True), Scheduler(FIXED), "mixed-size mode"),
        (GpuModes(GPU, mig=True), Scheduler(BEST), "MIG mode"),
        (GpuModes(GPU), Scheduler(EQUAL, 31), "31 ms"),
        (GpuModes(GPU), Scheduler(FIXED, 0), "0 ms"),
        (GpuModes(GPU), Scheduler(BEST, 2), "best-effort"),
    ],
)
def test_a_scheduler_that_does_not_fit_the_modes_is_refused(
    modes: GpuModes, desired: Scheduler, expected: str | None
) -> None:
    reasons = refuse(modes, desired)
    assert [reason.code for reason in reasons] == ([ReasonCode.SCHEDULER_UNFIT] if expected else [])
    assert expected is None or expected in reasons[0].message


def test_a_scheduler_is_refused_while_its_mode_is_unread() -> None:
    assert [reason.code for reason in refuse(GpuModes(GPU, mig=ODD), Scheduler(EQUAL))] == [ReasonCode.UNREAD]
    assert [reason.code for reason in refuse(GpuModes(GPU, mixed_sizes=ODD), Scheduler(FIXED))] == [ReasonCode.UNREAD]
    assert refuse(GpuModes(GPU, mixed_sizes=ODD), Scheduler(EQUAL)) == ()


T4 = PciFunction(GPU, PciId(NVIDIA, 0x1EB8), 0x030200, driver="nvidia")
SHARED, CUT = ({VgpuType(name): 1} for name in ("GRID T4-4Q", "NVIDIA A30-1-6C"))


@pytest.mark.parametrize(
    ("function", "types", "has_one"),
    [
        (T4, SHARED, True),
        (T4, CUT, False),
        (T4, {}, False),
        (replace(T4, id=PciId(AMD, 0x74B5)), SHARED, False),
        (replace(T4, driver="vfio-pci"), SHARED, False),
        (replace(T4, driver=None), SHARED, False),
        (replace(T4, driver=ODD), SHARED, False),
    ],
)
def test_which_gpus_have_a_scheduler(function: PciFunction, types: Mapping[VgpuType, int], *, has_one: bool) -> None:
    board = GpuState(VgpuHost(GPU, Framework.MDEV, {GPU: types}))
    assert (scheduler_context_of(function, board) is not None) is has_one


@pytest.mark.parametrize(
    ("desired", "value"),
    [
        (Scheduler(BEST), 0x00),
        (Scheduler(EQUAL), 0x01),
        (Scheduler(FIXED), 0x11),
        (Scheduler(EQUAL, 3), 0x00030003),
        (Scheduler(FIXED, 24), 0x00180011),
    ],
)
def test_registry_values_match_nvidias_examples(desired: Scheduler, value: int) -> None:
    assert registry_value(desired) == value


def line(value: str) -> str:
    return f'{HEAD}\noptions nvidia NVreg_RegistryDwordsPerDevice="{value}"\n'


def test_each_gpu_has_an_entry_in_the_same_line() -> None:
    first = merge(None, OTHER, 0x00180011)
    assert first == line(f"pci={OTHER};RmPVMRL=0x00180011")
    both = merge(first, GPU, 0x01)
    assert both == line(f"pci={GPU};RmPVMRL=0x01;pci={OTHER};RmPVMRL=0x00180011")
    assert merge(both, GPU, 0x11) == line(f"pci={GPU};RmPVMRL=0x11;pci={OTHER};RmPVMRL=0x00180011")
    assert merge(both, GPU, None) == first
    assert merge(first, OTHER, None) is None
    assert merge(None, GPU, None) is None


def test_other_keys_of_gpuvirts_file_stay() -> None:
    text = line(f"pci={GPU};RmOther=0x5;RmPVMRL=0x01")
    assert merge(text, GPU, None) == line(f"pci={GPU};RmOther=0x5")


@pytest.mark.parametrize(
    "text",
    [
        "options nvidia NVreg_EnableMSI=1\n",
        line(f"pci={GPU};RmPVMRL=0x01") + "blacklist nouveau\n",
        line("RmPVMRL=0x01"),
        line("pci=65:00;RmPVMRL=0x01"),
        line(f"pci={GPU};RmPVMRL=lots"),
        line(f"pci={GPU}").replace('"', ""),
    ],
)
def test_a_file_in_another_format_is_left_alone(text: str) -> None:
    with pytest.raises(DamagedError, match=str(FILE)):
        merge(text, GPU, 0x01)


ADDRESSES = st.builds(lambda bus: PciAddress(f"0000:{bus:02x}:00.0"), st.integers(0, 5))


@given(st.lists(st.tuples(ADDRESSES, st.none() | st.integers(0, 0xFFFFFFFF)), max_size=12))
def test_the_file_has_the_last_value_of_each_gpu(words: list[tuple[PciAddress, int | None]]) -> None:
    text: str | None = None
    for gpu, value in words:
        text = merge(text, gpu, value)
    last = {gpu: value for gpu, value in dict(words).items() if value is not None}
    stands = [part.split(";RmPVMRL=") for part in (text or "").partition('"')[2].rstrip('"\n').split(";pci=") if part]
    assert {PciAddress(gpu.removeprefix("pci=")): int(value, 16) for gpu, value in stands} == last


def test_another_file_with_the_same_option_is_a_conflict() -> None:
    own_file = Attribute(FILE, line(f"pci={OTHER};RmPVMRL=0x01"))
    harmless = Attribute(HostPath("/etc/modprobe.d/nvidia.conf"), 'options nvidia NVreg_RegistryDwords="RmPVMRL=0x01"')
    assert conflicting_options([own_file, harmless], GPU) == ()
    comment = Attribute(HostPath("/etc/modprobe.d/z.conf"), '# options nvidia NVreg_RegistryDwordsPerDevice="a=0x1"\n')
    assert conflicting_options([own_file, comment], GPU) == ()
    split = Attribute(
        HostPath("/etc/modprobe.d/x.conf"),
        'options \\\n nvidia NVreg_EnableMSI=1 NVreg_RegistryDwordsPerDevice="a=0x1"',
    )
    (reason,) = conflicting_options([own_file, harmless, split], GPU)
    assert (reason.code, reason.places[0].path) == (ReasonCode.OPTION_ELSEWHERE, "/etc/modprobe.d/x.conf")
    (unread,) = conflicting_options([Attribute(HostPath("/etc/modprobe.d/y.conf"), ODD)], GPU)
    assert unread.code is ReasonCode.UNREAD


@pytest.fixture
def roots(tmp_path: Path) -> HostRoots:
    (tmp_path / "etc/modprobe.d").mkdir(parents=True)
    return HostRoots.under(tmp_path)


def test_schedulers_are_written_to_gpuvirts_file_only(roots: HostRoots) -> None:
    kernel, mine, others = RealKernel(roots), roots.local(FILE), roots.root / "etc/modprobe.d/nvidia.conf"
    assert write_module_options(kernel, roots, GPU, Scheduler(FIXED, 24)) == ()
    assert mine.read_text() == line(f"pci={GPU};RmPVMRL=0x00180011")
    assert mine.stat().st_mode & 0o777 == 0o644
    others.write_text(f'options nvidia NVreg_RegistryDwordsPerDevice="pci={OTHER};RmPVMRL=0x01"\n')
    before = mine.read_text(), others.read_text()
    assert [reason.code for reason in write_module_options(kernel, roots, OTHER, Scheduler(EQUAL))] == [
        ReasonCode.OPTION_ELSEWHERE
    ]
    assert (mine.read_text(), others.read_text()) == before
    assert write_module_options(kernel, roots, GPU, None) == (), "gpuvirt's own entry can always be removed"
    assert not mine.exists()
    assert others.exists()
