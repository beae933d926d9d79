"""The state of a GPU whose vGPUs depend on its mode and its GPU instances, and plans for it."""

from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType, parse_pci_id
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import (
    Framework,
    GpuInstance,
    GpuModes,
    LiveVgpu,
    Scheduler,
    SchedulerPolicy,
    SmiReport,
    VgpuHost,
)
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import plan_vgpus
from gpuvirt.model.vgputypes import catalog
from gpuvirt.paths import HostPath

GPU = PciAddress("0000:17:00.0")
VFS = [PciAddress(f"0000:17:{number // 8:02x}.{number % 8}") for number in range(4, 20)]
(A30,) = catalog.cards_of(parse_pci_id("10de:20b7"), None)
NAMES = {vgpu_type.profile.text: VgpuType(f"NVIDIA {vgpu_type.profile.text}") for vgpu_type in A30.types()}
MOST = {NAMES[vgpu_type.profile.text]: vgpu_type.most for vgpu_type in A30.types()}
TYPES = {str(number): vgpu_type for number, vgpu_type in enumerate(MOST)}
BEST, EQUAL = Scheduler(SchedulerPolicy.BEST_EFFORT), Scheduler(SchedulerPolicy.EQUAL_SHARE)
ODD = Unread(HostPath("/usr/bin/nvidia-smi"), seen="?")
ONE_ON_EACH_HALF = (GpuInstance(1, "1g.6gb", 14, 1, 1), GpuInstance(2, "1g.6gb", 14, 3, 1))


def gpu_state() -> GpuState:
    modes = GpuModes(GPU, mixed_sizes=False, can_mix_sizes=True, mig=False, mig_pending=False)
    host = VgpuHost(GPU, Framework.MDEV, {vf: {} for vf in VFS})
    return GpuState(host, most=MOST, card=A30, smi=SmiReport(modes, TYPES, BEST))


def named(desired_vgpus: DesiredVgpus) -> dict[VgpuType, int]:
    return {NAMES[name]: number for name, number in desired_vgpus.types.items()}


def planned(one: GpuState, desired_vgpus: DesiredVgpus) -> VgpuPlan:
    return plan_vgpus(one, named(desired_vgpus), desired_vgpus)


def in_mig_mode(*instances: GpuInstance, vgpus: tuple[str, ...] = ()) -> GpuState:
    """Return a GPU state with such GPU instances and with vGPUs of such types."""
    modes = GpuModes(GPU, mig=True, mig_pending=True, gpu_instances=instances)
    creatable = zip(vgpus, VFS, strict=False)
    live = tuple(LiveVgpu(VgpuId(f"vgpu-{slot}"), NAMES[name], slot, None) for name, slot in creatable)
    return replace(gpu_state(), host=replace(gpu_state().host, live=live), smi=SmiReport(modes, TYPES, BEST))
