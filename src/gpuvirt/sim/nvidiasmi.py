"""A simulated nvidia-smi: what it writes, what it changes, and the exit codes with which it fails.

The texts of `-q`, `vgpu -s -v` and `mig` follow published ones; exit codes are NVML's (nvmlReturn_t). What
`vgpu -ss` and `vgpu set-scheduler-state` write and take is not published, and here in a form of this simulator's own.
"""

from collections.abc import Callable, Iterator, Sequence

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.tools import Ended
from gpuvirt.sim.function import SimFunction
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.vfs import Carrier
from gpuvirt.sim.vgpu import Carving, VgpuTypeSpec

INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, IN_USE, INSUFFICIENT_RESOURCES = 2, 3, 6, 19, 23
"""nvml.h, nvmlReturn_t"""
WORDS = {
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NOT_FOUND: "Not Found",
    IN_USE: "In use by another client",
    INSUFFICIENT_RESOURCES: "Insufficient Resources",
}
POLICIES = {
    "1": SchedulerPolicy.BEST_EFFORT,
    "2": SchedulerPolicy.EQUAL_SHARE,
    "3": SchedulerPolicy.FIXED_SHARE,
}
POLICY_WORDS = {
    SchedulerPolicy.BEST_EFFORT: "Best Effort",
    SchedulerPolicy.EQUAL_SHARE: "Equal Share",
    SchedulerPolicy.FIXED_SHARE: "Fixed Share",
}
NS_PER_MS = 1_000_000
HELP = """
    set-scheduler-state -- Set the vGPU scheduler state.

    Usage: nvidia-smi vgpu set-scheduler-state [options]

    Options include:
    [-h | --help]: Display help information
    [-i | --id]: Enumeration index, PCI bus ID or UUID.
    [-p | --policy]: Scheduler policy
                     1 - Best Effort, 2 - Equal Share, 3 - Fixed Share
    [-t | --time-slice]: Time slice in nanoseconds
"""

Options = dict[str, str]
"""What stands after each option; nothing after those that stand alone."""


class NvidiaSmi:
    """The program on one machine."""

    def __init__(self, kernel: SimKernel) -> None:
        self._kernel = kernel

    def run(self, arguments: Sequence[str]) -> Ended:
        """Return how a command ends."""
        words = [word for word in arguments if word in {"vgpu", "mig", "set-scheduler-state"}]
        options = _options([word for word in arguments if word not in words])
        if words == ["vgpu", "set-scheduler-state"] and "-h" in options:
            return Ended(0, HELP, "")
        gpu = self._gpu(options.get("-i", ""))
        if gpu is None:
            return Ended(NOT_FOUND, "No devices were found\n", "")
        actions: dict[tuple[str, ...], Callable[[SimFunction, Options], Ended]] = {
            (): self._plain,
            ("mig",): self._mig,
            ("vgpu",): self._vgpu,
            ("vgpu", "set-scheduler-state"): self._set_scheduler,
        }
        return actions[tuple(words)](gpu, options)

    def _gpu(self, address: str) -> SimFunction | None:
        function = self._kernel.pci.functions.get(PciAddress(address.lower()))
        known = function is not None and function.driver == "nvidia" and function.id.vendor == NVIDIA
        return function if known and function is not None and function.physfn is None else None

    def _carrier(self, gpu: SimFunction) -> Carrier | None:
        return self._kernel.vfs.carriers.get(gpu.address)

    def _plain(self, gpu: SimFunction, options: Options) -> Ended:
        if "-mig" in options:
            return self._set_mig(gpu, on=options["-mig"] == "1")
        return Ended(
            0, "\n".join(["", "==============NVSMI LOG==============", "", *_query(gpu, self._carrier(gpu))]), ""
        )

    def _set_mig(self, gpu: SimFunction, *, on: bool) -> Ended:
        carrier, name = self._carrier(gpu), _bus_id(gpu)
        verb = "Enable" if on else "Disable"
        if carrier is None or not carrier.carving.profiles:
            return _failed(NOT_SUPPORTED, f"Unable to {verb.lower()} MIG Mode for GPU {name}")
        carving = carrier.carving
        carving.mig_pending = on
        if carving.mig != on and (carving.live or carving.instances or self._is_open(gpu)):
            waits = f"Warning: MIG mode is in pending {verb.lower()} state for GPU {name}:{WORDS[IN_USE]}"
            return Ended(0, f"{waits}\nAll done.\n", "")
        if carving.mig != on:
            carving.forget()
            self._kernel.mdev.refresh(carving)
        return Ended(0, f"{verb}d MIG Mode for GPU {name}\nAll done.\n", "")

    def _is_open(self, gpu: SimFunction) -> bool:
        return self._kernel.nvidia.is_open(gpu.address)

    def _mig(self, gpu: SimFunction, options: Options) -> Ended:
        carrier = self._carrier(gpu)
        if carrier is None or not carrier.carving.mig:
            return Ended(NOT_FOUND, "No MIG-enabled devices found.\n", "")
        carving = carrier.carving
        if "-cgi" in options:
            return _create_instance(carving, options["-cgi"])
        if "-dci" in options:
            return _destroy_computing(carving, int(options["-gi"]))
        if "-dgi" in options:
            return _destroy_instance(carving, int(options["-gi"]))
        if not carving.instances:
            return Ended(NOT_FOUND, "No GPU instances found: Not Found\n", "")
        return Ended(0, "\n".join([*_table(carving), ""]), "")

    def _vgpu(self, gpu: SimFunction, options: Options) -> Ended:
        carrier = self._carrier(gpu)
        if carrier is None:
            return _failed(NOT_SUPPORTED, f"GPU {_bus_id(gpu)} carries no vGPUs")
        carving = carrier.carving
        if "-shm" in options:
            return _set_mixed_sizes(gpu, carving, on=options["-shm"] == "1")
        lines = _scheduler(carving) if "-ss" in options else _supported(carving, gpu)
        return Ended(0, "\n".join([f"GPU {_bus_id(gpu)}", *lines, ""]), "")

    def _set_scheduler(self, gpu: SimFunction, options: Options) -> Ended:
        carrier, policy = self._carrier(gpu), POLICIES.get(options.get("--policy", ""))
        if policy is None:
            return _failed(INVALID_ARGUMENT, "Unable to set the scheduler state")
        if carrier is None or carrier.carving.mig:
            return _failed(NOT_SUPPORTED, f"Unable to set the scheduler state of GPU {_bus_id(gpu)}")
        carving = carrier.carving
        if policy is SchedulerPolicy.FIXED_SHARE and carving.mixed_sizes:
            return _failed(NOT_SUPPORTED, f"Unable to set the scheduler state of GPU {_bus_id(gpu)}")
        if any(self._in_use(vgpu) for vgpu in carving.live):
            return _failed(IN_USE, f"Unable to set the scheduler state of GPU {_bus_id(gpu)}")
        nanoseconds = int(options.get("--time-slice", "0"))
        carving.scheduler = Scheduler(policy, nanoseconds // NS_PER_MS or None)
        return Ended(0, f"Successfully set the scheduler state of GPU {_bus_id(gpu)}\n", "")

    def _in_use(self, vgpu: str) -> bool:
        return any(self._kernel.vfio.in_use(number, vgpu) for number in self._kernel.vfio.groups)


def _options(arguments: Sequence[str]) -> Options:
    found: Options = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("-"):
            found[word] = "" if after.startswith("-") else after
    return found


def _failed(code: int, what: str) -> Ended:
    return Ended(code, f"{what}: {WORDS[code]}\n", "")


def _bus_id(gpu: SimFunction) -> str:
    return f"0000{gpu.address.upper()}"


def _row(indent: int, key: str, value: str) -> str:
    return f"{' ' * indent}{key:<{38 - indent}}: {value}"


def _query(gpu: SimFunction, carrier: Carrier | None) -> Iterator[str]:
    carving = carrier.carving if carrier is not None else None
    mig = "N/A" if carving is None or not carving.profiles else _switched(on=carving.mig)
    pending = "N/A" if carving is None or not carving.profiles else _switched(on=carving.mig_pending)
    mixed = "N/A" if carving is None or not carving.can_mix_sizes else _switched(on=carving.mixed_sizes)
    yield _row(0, "Attached GPUs", "1")
    yield f"GPU {_bus_id(gpu)}"
    yield _row(4, "Product Brand", "NVIDIA")
    yield "    vGPU Device Capability"
    yield _row(8, "Heterogeneous Time-Slice Profiles", "Supported" if carving is not None else "N/A")
    can_mix = "N/A" if carving is None else "Supported" if carving.can_mix_sizes else "Not Supported"
    yield _row(8, "Heterogeneous Time-Slice Sizes", can_mix)
    yield "    MIG Mode"
    yield _row(8, "Current", mig)
    yield _row(8, "Pending", pending)
    yield "    GPU Virtualization Mode"
    yield _row(8, "Virtualization Mode", "Host VGPU" if carving is not None else "None")
    yield _row(8, "Host VGPU Mode", "SR-IOV" if gpu.total_vfs else "Non SR-IOV" if carving is not None else "N/A")
    yield _row(8, "vGPU Heterogeneous Mode", mixed)
    yield ""


def _switched(*, on: bool) -> str:
    return "Enabled" if on else "Disabled"


def _supported(carving: Carving, gpu: SimFunction) -> Iterator[str]:
    numbers = {profile.name: str(profile.id) for profile in carving.profiles}
    for spec in carving.all_types:
        yield _row(4, "vGPU Type ID", f"{spec.id:#x}")
        yield _row(8, "Name", spec.name)
        yield _row(8, "Class", "Compute")
        yield _row(8, "GPU Instance Profile ID", numbers[spec.profile] if spec.profile is not None else "N/A")
        yield _row(8, "Max Instances", str(spec.most))
        yield _row(8, "Device ID", f"0x{gpu.id.device:04x}10de")
        yield _row(8, "FB Memory", f"{_framebuffer_mib(spec)} MiB")


def _framebuffer_mib(spec: VgpuTypeSpec) -> int:
    """Return the framebuffer of a type: of `12G`, and of a GPU instance's profile, `2g.12gb`."""
    size = spec.size.removesuffix("gb").rpartition(".")[2].removesuffix("G")
    return int(size) * 1024 if size.isdigit() else 1024


def _scheduler(carving: Carving) -> Iterator[str]:
    yield "    vGPU Scheduler State"
    yield _row(8, "Scheduler Policy", POLICY_WORDS[carving.scheduler.policy])
    if carving.scheduler.policy is not SchedulerPolicy.BEST_EFFORT:
        most = max((spec.most for spec, _ in carving.live.values()), default=1)
        timeslice_ms = carving.scheduler.timeslice_ms or (2 if most <= 8 else 1)
        yield _row(8, "Time Slice", f"{timeslice_ms * NS_PER_MS} ns")


def _set_mixed_sizes(gpu: SimFunction, carving: Carving, *, on: bool) -> Ended:
    what = f"Unable to set vGPU heterogeneous mode of GPU {_bus_id(gpu)}"
    if carving.mig or not carving.can_mix_sizes:
        return _failed(NOT_SUPPORTED, what)
    if carving.live:
        return _failed(IN_USE, what)
    carving.mixed_sizes = on
    return Ended(0, f"{_switched(on=on)} vGPU heterogeneous mode for GPU {_bus_id(gpu)}\n", "")


def _table(carving: Carving) -> Iterator[str]:
    line = f"+{'-' * 55}+"
    yield line
    yield "| GPU instances:                                        |"
    yield "| GPU   Name             Profile  Instance   Placement  |"
    yield "|                          ID       ID       Start:Size |"
    yield "|=======================================================|"
    for one in carving.instances:
        yield f"|{0:>4}  MIG {one.profile:<15}{one.profile_id:>4}{one.id:>9}{f'{one.start}:{one.size}':>13}     |"
        yield line


def _create_instance(carving: Carving, wanted: str) -> Ended:
    profile = next((one for one in carving.profiles if wanted in {one.name, str(one.id)}), None)
    made = carving.add_instance(profile) if profile is not None else None
    if profile is None or made is None:
        code = INVALID_ARGUMENT if profile is None else INSUFFICIENT_RESOURCES
        what = f"Unable to create a GPU instance on GPU  0 using profile {wanted}: {WORDS[code]}"
        return _failed(code, f"{what}\nFailed to create GPU instances")
    named = f"profile MIG {profile.name} (ID {profile.id:>2})"
    return Ended(0, f"Successfully created GPU instance ID {made.id:>2} on GPU  0 using {named}\n", "")


def _destroy_computing(carving: Carving, number: int) -> Ended:
    if number not in carving.computing:
        return Ended(NOT_FOUND, "No compute instances found: Not Found\n", "")
    carving.computing.remove(number)
    return Ended(0, f"Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID {number:>2}\n", "")


def _destroy_instance(carving: Carving, number: int) -> Ended:
    found = next((one for one in carving.instances if one.id == number), None)
    if found is None or number in {*carving.on_instance.values(), *carving.computing}:
        code = NOT_FOUND if found is None else IN_USE
        what = f"Unable to destroy GPU instance ID {number:>2} from GPU  0: {WORDS[code]}"
        return _failed(code, f"{what}\nFailed to destroy GPU instances")
    carving.instances.remove(found)
    return Ended(0, f"Successfully destroyed GPU instance ID {number:>2} from GPU  0\n", "")
