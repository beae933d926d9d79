"""The output of the simulated nvidia-smi about GPUs: modes, lists, vGPU types, GPU instances.

The texts of `-q`, `vgpu -s -v` and `mig` follow published ones. The text of `vgpu -ss` is not published; its form here
is this simulator's own, as are the summaries.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.vgpu import SchedulerPolicy
from gpuvirt.model.inventory import pciids
from gpuvirt_sim.devices.function import SimFunction
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.devices.vgpu import MigProfileSpec, SimVgpuHost, VgpuTypeSpec

NS_PER_MS = 1_000_000
RULE = f"+{'-' * 55}+"
POLICY_WORDS = {
    SchedulerPolicy.BEST_EFFORT: "Best Effort",
    SchedulerPolicy.EQUAL_SHARE: "Equal Share",
    SchedulerPolicy.FIXED_SHARE: "Fixed Share",
}


class SmiGpu(msgspec.Struct, frozen=True):
    """A GPU as nvidia-smi shows it."""

    index: int
    function: SimFunction
    vgpu_host: SimVgpuHost | None
    """None: the GPU carries no vGPUs."""

    @property
    def bus_id(self) -> str:
        """`00000000:65:00.0`"""
        return f"0000{self.function.address.upper()}"

    @property
    def uuid(self) -> str:
        """`GPU-...`, the same in every run."""
        return gpu_uuid(self.function.address)

    @property
    def name(self) -> str:
        """`NVIDIA A10`"""
        text = pciids.shipped().get(self.function.id, str(self.function.id))
        return f"NVIDIA {text.partition('[')[2].partition(']')[0] or text}"

    @property
    def mig_mode(self) -> str:
        """The GPU's MIG mode."""
        return "N/A" if self.vgpu_host is None or not self.vgpu_host.profiles else switched(on=self.vgpu_host.mig)


def switched(*, on: bool) -> str:
    """Return the word for a mode."""
    return "Enabled" if on else "Disabled"


def _row(indent: int, key: str, value: str) -> str:
    return f"{' ' * indent}{key:<{38 - indent}}: {value}"


def query(gpus: Sequence[SmiGpu]) -> Iterator[str]:
    """Yield the output of `-q`."""
    yield from ("", "==============NVSMI LOG==============", "")
    yield _row(0, "Attached GPUs", str(len(gpus)))
    for gpu in gpus:
        yield from _modes(gpu)


def _modes(gpu: SmiGpu) -> Iterator[str]:
    vgpu_host = gpu.vgpu_host
    pending = "N/A" if vgpu_host is None or not vgpu_host.profiles else switched(on=vgpu_host.mig_pending)
    mixed = "N/A" if vgpu_host is None or not vgpu_host.can_mix_sizes else switched(on=vgpu_host.mixed_sizes)
    yield f"GPU {gpu.bus_id}"
    yield _row(4, "Product Brand", "NVIDIA")
    yield "    vGPU Device Capability"
    yield _row(8, "Heterogeneous Time-Slice Profiles", "Supported" if vgpu_host is not None else "N/A")
    can_mix = "N/A" if vgpu_host is None else "Supported" if vgpu_host.can_mix_sizes else "Not Supported"
    yield _row(8, "Heterogeneous Time-Slice Sizes", can_mix)
    yield "    MIG Mode"
    yield _row(8, "Current", gpu.mig_mode)
    yield _row(8, "Pending", pending)
    yield "    GPU Virtualization Mode"
    yield _row(8, "Virtualization Mode", "Host VGPU" if vgpu_host is not None else "None")
    sriov = "SR-IOV" if gpu.function.total_vfs else "Non SR-IOV" if vgpu_host is not None else "N/A"
    yield _row(8, "Host VGPU Mode", sriov)
    yield _row(8, "vGPU Heterogeneous Mode", mixed)
    yield ""


def listed(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the output of `-L`."""
    for gpu in gpus:
        yield f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})"
    yield ""


def summary(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the output of nvidia-smi without options."""
    line = f"+{'-' * 75}+"
    yield line
    yield f"| {'NVIDIA-SMI of a simulated host':<74}|"
    yield line
    yield f"| {'GPU':<4} {'Name':<27} {'Bus-Id':<17} {'MIG M.':<9} {'VFs':>4} {'vGPUs':>6}  |"
    yield f"|{'=' * 75}|"
    for gpu in gpus:
        vfs = str(len(gpu.function.virtfns)) if gpu.function.total_vfs else "N/A"
        vgpus = "N/A" if gpu.vgpu_host is None else str(len(gpu.vgpu_host.live))
        yield f"| {gpu.index:>3}  {gpu.name:<27.27} {gpu.bus_id:<17} {gpu.mig_mode:<9} {vfs:>4} {vgpus:>6}  |"
    yield line
    yield ""


def vgpus(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the output of `vgpu`: the GPUs, and the vGPUs on each."""
    for gpu in gpus:
        yield f"GPU {gpu.bus_id}"
        for vgpu, (spec, slot) in gpu.vgpu_host.live.items() if gpu.vgpu_host is not None else ():
            yield f"    {vgpu}  {spec.name}  on {slot}"
    yield ""


def supported(gpu: SmiGpu, specs: Iterable[VgpuTypeSpec], *, verbose: bool) -> Iterator[str]:
    """Yield the output of `vgpu -s` and `vgpu -c` for a GPU."""
    profiles = gpu.vgpu_host.profiles if gpu.vgpu_host is not None else ()
    numbers = {profile.name: str(profile.id) for profile in profiles}
    yield f"GPU {gpu.bus_id}"
    for spec in specs:
        if not verbose:
            yield f"    {spec.name}"
            continue
        yield _row(4, "vGPU Type ID", f"{spec.id:#x}")
        yield _row(8, "Name", spec.name)
        yield _row(8, "Class", "Compute")
        yield _row(8, "GPU Instance Profile ID", numbers[spec.profile] if spec.profile is not None else "N/A")
        yield _row(8, "Max Instances", str(spec.most))
        yield _row(8, "Device ID", f"0x{gpu.function.id.device:04x}10de")
        yield _row(8, "FB Memory", f"{_framebuffer_mib(spec)} MiB")
    yield ""


def _framebuffer_mib(spec: VgpuTypeSpec) -> int:
    """Return the framebuffer of a type from its size: `12G`, or `2g.12gb` with a GPU instance."""
    size = spec.size.removesuffix("gb").rpartition(".")[2].removesuffix("G")
    return int(size) * 1024 if size.isdigit() else 1024


def scheduler(gpu: SmiGpu, vgpu_host: SimVgpuHost) -> Iterator[str]:
    """Yield the output of `vgpu -ss` for a GPU."""
    yield f"GPU {gpu.bus_id}"
    yield "    vGPU Scheduler State"
    yield _row(8, "Scheduler Policy", POLICY_WORDS[vgpu_host.scheduler.policy])
    if vgpu_host.scheduler.policy is not SchedulerPolicy.BEST_EFFORT:
        most = max((spec.most for spec, _ in vgpu_host.live.values()), default=1)
        timeslice_ms = vgpu_host.scheduler.timeslice_ms or (2 if most <= 8 else 1)
        yield _row(8, "Time Slice", f"{timeslice_ms * NS_PER_MS} ns")
    yield ""


def instances(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the table of `mig -lgi`."""
    yield from _header(
        "| GPU instances:                                        |",
        "| GPU   Name             Profile  Instance   Placement  |",
        "|                          ID       ID       Start:Size |",
    )
    for gpu in gpus:
        for instance in gpu.vgpu_host.instances if gpu.vgpu_host is not None else ():
            place = f"{instance.start}:{instance.size}"
            numbers = f"{instance.profile_id:>4}{instance.id:>9}{place:>13}"
            yield f"|{gpu.index:>4}  MIG {instance.profile:<14}{numbers}     |"
            yield RULE
    yield ""


def profiles(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the table of `mig -lgip`."""
    yield from _header(
        "| GPU instance profiles:                                |",
        "| GPU   Name             ID    Instances   Memory       |",
        "|                              Free/Total  slices       |",
    )
    for gpu in gpus:
        for profile in gpu.vgpu_host.profiles if gpu.vgpu_host is not None else ():
            free = f"{_count_free(gpu, profile)}/{_count_free(gpu, profile, empty=True)}"
            yield f"|{gpu.index:>4}  MIG {profile.name:<12}{profile.id:>4}{free:>12}{profile.size:>10}       |"
    yield RULE
    yield ""


def _header(*titles: str) -> Iterator[str]:
    yield from (RULE, *titles, f"|{'=' * 55}|")


def _count_free(gpu: SmiGpu, profile: MigProfileSpec, *, empty: bool = False) -> int:
    """Return how many more GPU instances of a profile fit on a GPU, or how many on an empty one."""
    if gpu.vgpu_host is None:
        return 0
    tried = replace(gpu.vgpu_host, instances=[] if empty else list(gpu.vgpu_host.instances))
    count = 0
    while tried.add_instance(profile) is not None:
        count += 1
    return count


def compute_instances(gpus: Iterable[SmiGpu]) -> Iterator[str]:
    """Yield the table of `mig -lci`."""
    yield "| GPU  GPU instance  Compute instance |"
    for gpu in gpus:
        for number in sorted(gpu.vgpu_host.computing) if gpu.vgpu_host is not None else ():
            yield f"|{gpu.index:>4}{number:>10}{0:>16}       |"
    yield ""
