"""The outputs of nvidia-smi for a GPU, their parsers, and the effects of a mode on a host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.errors import VfsUnchangedError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Framework, GpuInstance, GpuModes, Scheduler, SchedulerPolicy, VgpuHost
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.hardware.functions import sriov
from gpuvirt.hardware.programs import nvidiasmi, vgpuscheduler
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.contract.proofs import disable_vfs, enable_vfs, free, remove, set_scheduler

MIXED, OFF = PciAddress("0000:4b:00.0"), PciAddress("0000:b1:00.0")
"""A GPU in mixed-size mode, and a GPU whose VFs are disabled."""
A100, ON_VFIO = PciAddress("0000:07:00.0"), PciAddress("0000:87:00.0")
"""A GPU with four vGPUs of the same size, and a GPU without its native driver."""
A30 = [PciAddress(f"0000:{bus}:00.0") for bus in ("17", "ca")]


class HostWithPrograms:
    """A simulated host with its programs."""

    def __init__(self, name: str) -> None:
        self.kernel: SimKernel = build_host(load_host(name), where=name)
        self.tools = SimTools(self.kernel)

    def host(self, gpu: PciAddress) -> VgpuHost | None:
        return scan(self.kernel).vgpu_hosts.get(gpu)

    def offered(self, gpu: PciAddress) -> set[str]:
        host = self.host(gpu)
        return {name for types in host.creatable.values() for name, left in types.items() if left} if host else set()

    def empty(self, gpu: PciAddress) -> None:
        host = self.host(gpu)
        for vgpu in host.live if host else ():
            remove(backend_of(host.framework if host else Framework.MDEV), self.kernel, vgpu)


@pytest.fixture
def a10() -> HostWithPrograms:
    return HostWithPrograms("2xA10-vgpu")


@pytest.fixture
def a100() -> HostWithPrograms:
    return HostWithPrograms("8xA100")


@pytest.fixture
def a30() -> HostWithPrograms:
    host = HostWithPrograms("2xA30")
    enable_vfs(host.kernel, host.tools, A30[1])
    return host


# Published outputs, with fields left out.
QUERY = """
==============NVSMI LOG==============

Timestamp                                 : Sat Mar  2 10:11:12 2024
Driver Version                            : 550.54.16
CUDA Version                              : Not Found
vGPU Driver Capability
        Heterogenous Multi-vGPU           : Supported

Attached GPUs                             : 2
GPU 00000000:B1:00.0
    Product Name                          : NVIDIA A10
    Display Mode                          : Enabled
    vGPU Device Capability
        Fractional Multi-vGPU             : Supported
        Heterogeneous Time-Slice Profiles : Supported
        Heterogeneous Time-Slice Sizes    : Supported
    MIG Mode
        Current                           : N/A
        Pending                           : N/A
    GPU Operation Mode
        Current                           : Enabled
        Pending                           : Enabled
    GPU Virtualization Mode
        Virtualization Mode               : Host VGPU
        Host VGPU Mode                    : SR-IOV
        vGPU Heterogeneous Mode           : Disabled
    PCI
        Bus Id                            : 00000000:B1:00.0
GPU 00000000:4B:00.0
    MIG Mode
        Current                           : Enabled
        Pending                           : Disabled
    GPU Virtualization Mode
        vGPU Heterogeneous Mode           : Enabled
"""


def test_modes_are_read_of_the_requested_gpu() -> None:
    assert nvidiasmi.parse_modes(QUERY, OFF) == GpuModes(
        OFF, mixed_sizes=False, can_mix_sizes=True, mig=None, mig_pending=None
    )
    second = nvidiasmi.parse_modes(QUERY, MIXED)
    assert (second.mixed_sizes, second.mig, second.mig_pending) == (True, True, False)


def test_an_unknown_mode_is_unread_and_never_off() -> None:
    odd = nvidiasmi.parse_modes(QUERY.replace(": Disabled", ": Vielleicht"), OFF)
    assert isinstance(odd.mixed_sizes, Unread)
    assert odd.mixed_sizes.seen == "-q: GPU Virtualization Mode / vGPU Heterogeneous Mode: Vielleicht"
    without_modes = nvidiasmi.parse_modes("GPU 00000000:B1:00.0\n    Product Name : NVIDIA A10\n", OFF)
    assert all(
        isinstance(mode, Unread) for mode in (without_modes.mixed_sizes, without_modes.can_mix_sizes, without_modes.mig)
    )
    other = nvidiasmi.parse_modes(QUERY, A100)
    assert all(isinstance(mode, Unread) for mode in (other.mixed_sizes, other.mig, other.gpu_instances))


def test_a_mode_that_an_older_driver_does_not_print_is_absent() -> None:
    older = QUERY.replace("        vGPU Heterogeneous Mode           : Disabled\n", "")
    assert nvidiasmi.parse_modes(older, OFF).mixed_sizes is None


@given(st.text(alphabet="GPU 0:31.ab\n|-NA/EnabledMIGMode", max_size=300))
def test_the_parsers_accept_arbitrary_text(text: str) -> None:
    for whole in (text, f"GPU 00000000:B1:00.0\n{text}"):
        modes = nvidiasmi.parse_modes(whole, OFF)
        assert modes.mixed_sizes is None or isinstance(modes.mixed_sizes, bool | Unread)
        assert isinstance(nvidiasmi.parse_supported(whole, OFF), tuple | Unread)
        assert isinstance(nvidiasmi.parse_instances(whole), tuple | Unread)
        assert isinstance(vgpuscheduler.parse_state(whole, OFF), Scheduler | Unread)


TABLE = """+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 1g.10gb         19       11          4:1     |
+-------------------------------------------------------+
|   0  MIG 3g.40gb+me       9        2          0:4     |
+-------------------------------------------------------+
"""


def test_gpu_instances_are_the_rows_of_a_table() -> None:
    assert nvidiasmi.parse_instances(TABLE) == (
        GpuInstance(id=11, profile="1g.10gb", profile_id=19, start=4, size=1),
        GpuInstance(id=2, profile="3g.40gb+me", profile_id=9, start=0, size=4),
    )
    assert nvidiasmi.parse_instances("No GPU instances found: Not Found\n") == ()


@pytest.mark.parametrize("text", ["", "Segmentation fault", TABLE.replace("4:1 ", "four"), TABLE.replace("MIG 1", "1")])
def test_an_unknown_table_of_gpu_instances_is_unread(text: str) -> None:
    assert isinstance(nvidiasmi.parse_instances(text), Unread)


def test_the_supported_types_are_read_with_their_limits(a30: HostWithPrograms) -> None:
    found = nvidiasmi.read_supported(a30.tools, A30[1])
    assert not isinstance(found, Unread)
    shown = {
        str(vgpu_type.name): (vgpu_type.id, vgpu_type.framebuffer_mib, vgpu_type.most, vgpu_type.profile_id)
        for vgpu_type in found
    }
    assert shown["NVIDIA A30-12C"] == (686, 12288, 2, None)
    assert shown["NVIDIA A30-2-12C"] == (690, 12288, 2, 5)
    text = a30.tools.nvidia_smi("vgpu", "-i", A30[1], "-s", "-v")
    for broken in (text.replace("12288 MiB", "12 GB"), text.replace("Max Instances ", "Max ")):
        assert isinstance(nvidiasmi.parse_supported(broken, A30[1]), Unread)


# --- mixed sizes


def test_enabled_vfs_offer_types_until_they_are_disabled(a10: HostWithPrograms) -> None:
    gpu = OFF
    assert a10.host(gpu) is None, "a GPU without VFs has no vGPUs"
    enable_vfs(a10.kernel, a10.tools, gpu)
    function = scan(a10.kernel).functions[gpu]
    assert (len(function.virtfns), function.driver) == (32, "nvidia")
    host = a10.host(gpu)
    assert host is not None
    assert set(host.creatable) == set(function.virtfns)
    assert "NVIDIA A10-24Q" in a10.offered(gpu)
    disable_vfs(a10.kernel, a10.tools, gpu)
    assert (a10.host(gpu), scan(a10.kernel).functions[gpu].virtfns) == (None, ())


def test_mixed_sizes_are_off_after_vfs_were_enabled_or_disabled(a10: HostWithPrograms) -> None:
    gpu = OFF
    nvidiasmi.set_mixed_sizes(a10.tools, gpu, free(gpu), on=True)
    assert nvidiasmi.read_modes(a10.tools, gpu).mixed_sizes is True
    enable_vfs(a10.kernel, a10.tools, gpu)
    assert nvidiasmi.read_modes(a10.tools, gpu).mixed_sizes is False
    nvidiasmi.set_mixed_sizes(a10.tools, gpu, free(gpu), on=True)
    disable_vfs(a10.kernel, a10.tools, gpu)
    assert nvidiasmi.read_modes(a10.tools, gpu).mixed_sizes is False


def test_mixed_size_mode_offers_other_sizes(a10: HostWithPrograms, a100: HostWithPrograms) -> None:
    mixed = a10.offered(MIXED)
    assert {"NVIDIA A10-8Q", "NVIDIA A10-6Q", "NVIDIA A10-1Q"} <= mixed
    assert {"NVIDIA A10-24Q", "NVIDIA A10-12Q"}.isdisjoint(mixed), "12 GB and 4 GB are taken"
    host = a100.host(A100)
    assert host is not None
    remove(backend_of(host.framework), a100.kernel, host.live[0])
    assert a100.offered(A100) == {"NVIDIA A100DX-20C"}, "in equal-size mode"


@pytest.mark.parametrize(("gpu", "code"), [(A100, 19), (ON_VFIO, 6), (PciAddress("0000:99:00.0"), 6)])
def test_mixed_sizes_are_refused_with_the_exit_code_of_nvidia_smi(
    a100: HostWithPrograms, gpu: PciAddress, code: int
) -> None:
    with pytest.raises(ToolError) as failed:
        nvidiasmi.set_mixed_sizes(a100.tools, gpu, free(gpu), on=True)
    assert failed.value.exit_code == code


# --- VFs


def test_vfs_are_not_enabled_while_the_gpu_is_open(a10: HostWithPrograms) -> None:
    process = a10.kernel.start_process("dcgm", "/dev/nvidia1")
    with pytest.raises(ToolError, match=r"Cannot obtain unbindLock for 0000:b1:00\.0"):
        enable_vfs(a10.kernel, a10.tools, OFF)
    assert len(a10.tools.commands) == 5, "sriov-manage is tried again"
    a10.tools.commands.clear()
    a10.tools.before = lambda _: a10.kernel.end_vm(process) if len(a10.tools.commands) == 3 else None
    enable_vfs(a10.kernel, a10.tools, OFF)
    assert len(a10.tools.commands) == 3


def test_vfs_are_enabled_without_sriov_manage_only_if_the_driver_allows(a10: HostWithPrograms) -> None:
    a10.tools = SimTools(a10.kernel, programs=())
    with pytest.raises(VfsUnchangedError, match=r"no sriov-manage in /.*sriov_numvfs"):
        enable_vfs(a10.kernel, a10.tools, OFF)
    a10.kernel.pci.functions[OFF].takes_numvfs = True
    enable_vfs(a10.kernel, a10.tools, OFF)
    assert sriov.count_vfs(a10.kernel, OFF) == 32
    assert a10.tools.commands == []


def test_a_card_that_sriov_manage_leaves_without_vfs_is_reported(a10: HostWithPrograms) -> None:
    a10.tools.before = lambda _: setattr(a10.kernel.pci.functions[OFF], "total_vfs", None)
    with pytest.raises(VfsUnchangedError, match=r"b1:00.0/virtfn\*: 0 VFs; expected 32"):
        enable_vfs(a10.kernel, a10.tools, OFF)


# --- MIG


def test_a_gpu_in_mig_mode_offers_the_types_of_its_free_instances(a30: HostWithPrograms) -> None:
    modes = nvidiasmi.read_modes(a30.tools, A30[0])
    assert (modes.mig, modes.mig_pending) == (True, True)
    assert not isinstance(modes.gpu_instances, Unread)
    assert [instance.profile for instance in modes.gpu_instances] == ["2g.12gb", "1g.6gb", "1g.6gb"]
    assert a30.offered(A30[0]) == {"NVIDIA A30-1-6C"}, "the vGPUs of the other two instances exist"
    assert "NVIDIA A30-4C" in a30.offered(A30[1])


def test_mig_mode_is_enabled_and_disabled(a30: HostWithPrograms) -> None:
    gpu = A30[1]
    nvidiasmi.set_mig_mode(a30.tools, gpu, free(gpu), on=True)
    assert a30.offered(gpu) == set(), "no GPU instance exists yet"
    assert nvidiasmi.read_instances(a30.tools, gpu) == ()
    first = nvidiasmi.create_instance(a30.tools, gpu, "2g.12gb", 0)
    second = nvidiasmi.create_instance(a30.tools, gpu, "5", 2)
    assert first != second
    with pytest.raises(ToolError, match="Insufficient Resources"):
        nvidiasmi.create_instance(a30.tools, gpu, "1g.6gb", 3)
    assert a30.offered(gpu) == {"NVIDIA A30-2-12C"}
    for instance in (first, second):
        nvidiasmi.destroy_instance(a30.tools, gpu, instance, free(gpu))
    nvidiasmi.set_mig_mode(a30.tools, gpu, free(gpu), on=False)
    assert "NVIDIA A30-24C" in a30.offered(gpu)


def test_a_gpu_instance_with_a_vgpu_and_its_mig_mode_stay(a30: HostWithPrograms) -> None:
    with pytest.raises(ToolError, match="In use by another client") as failed:
        nvidiasmi.destroy_instance(a30.tools, A30[0], 1, free(A30[0]))
    assert failed.value.exit_code == 19
    nvidiasmi.set_mig_mode(a30.tools, A30[0], free(A30[0]), on=False)
    modes = nvidiasmi.read_modes(a30.tools, A30[0])
    assert (modes.mig, modes.mig_pending) == (True, False), "after a reset"
    assert len(build_inventory(scan(a30.kernel)).vgpus) == 2


def test_mig_mode_is_refused_on_a_card_without_mig(a10: HostWithPrograms) -> None:
    with pytest.raises(ToolError) as failed:
        nvidiasmi.set_mig_mode(a10.tools, OFF, free(OFF), on=True)
    assert failed.value.exit_code == 3
    assert nvidiasmi.read_modes(a10.tools, OFF).mig is None


# --- the scheduler


@pytest.mark.parametrize(
    "desired",
    [
        Scheduler(SchedulerPolicy.EQUAL_SHARE, 3),
        Scheduler(SchedulerPolicy.FIXED_SHARE),
        Scheduler(SchedulerPolicy.BEST_EFFORT),
    ],
)
def test_a_scheduler_is_set_and_read_back(a100: HostWithPrograms, desired: Scheduler) -> None:
    set_scheduler(a100.tools, A100, desired)
    found = vgpuscheduler.read_scheduler(a100.tools, A100)
    assert isinstance(found, Scheduler)
    assert found.policy is desired.policy
    assert desired.timeslice_ms in {None, found.timeslice_ms}


def test_a_scheduler_stays_while_vms_run_and_until_the_driver_is_unloaded(a100: HostWithPrograms) -> None:
    host = a100.host(A100)
    assert host is not None
    group = host.live[0].group
    assert isinstance(group, int)
    vm = a100.kernel.start_vm(group)
    with pytest.raises(ToolError) as failed:
        set_scheduler(a100.tools, A100, Scheduler(SchedulerPolicy.EQUAL_SHARE))
    assert failed.value.exit_code == 19
    a100.kernel.end_vm(vm)
    set_scheduler(a100.tools, A100, Scheduler(SchedulerPolicy.EQUAL_SHARE))
    a100.empty(A100)
    disable_vfs(a100.kernel, a100.tools, A100)
    found = vgpuscheduler.read_scheduler(a100.tools, A100)
    assert found == Scheduler(SchedulerPolicy.BEST_EFFORT)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("Scheduler Policy : EQUAL_SHARE\n    Time Slice (ns) : 3000000", Scheduler(SchedulerPolicy.EQUAL_SHARE, 3)),
        ("Policy : Fixed Share\n    Timeslice : 24 ms", Scheduler(SchedulerPolicy.FIXED_SHARE, 24)),
        ("Policy : best effort", Scheduler(SchedulerPolicy.BEST_EFFORT)),
        ("Policy : Equal Share\n    Time Slice : 3000000", None),
        ("Policy : Equal Share", None),
        ("Policy : Lottery", None),
        ("Fairness : Equal Share", None),
    ],
)
def test_the_scheduler_is_parsed_from_nvidia_smi(lines: str, expected: Scheduler | None) -> None:
    found = vgpuscheduler.parse_state(f"GPU 00000000:B1:00.0\n    {lines}\n", OFF)
    assert found == expected or (expected is None and isinstance(found, Unread))


def test_options_of_the_scheduler_are_parsed_from_the_help() -> None:
    named = "  [-p | --policy]: 1, 2 or 3\n  [-ts | --timeslice]: In\n       microseconds.\n  [-i | --id]: x\n"
    assert vgpuscheduler.parse_help(named) == vgpuscheduler.Options("--policy", "--timeslice", 1000)
    assert vgpuscheduler.parse_help("[-p | --policy]: x\n[-t | --time-slice]: how long\n") == (
        vgpuscheduler.Options("--policy")
    ), "an option without its unit is not used"
    with pytest.raises(ToolError, match="lists no option for a policy"):
        vgpuscheduler.parse_help("Usage: nvidia-smi vgpu\n  [-x | --extra]: x\n")
