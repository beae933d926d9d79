"""A simulated nvidia-smi: its changes, and the exit codes of its failures, which are NVML's (nvmlReturn_t).

The arguments of `vgpu set-scheduler-state` are not published; their form here is this simulator's own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpuvirt.facts.pci import NVIDIA, FunctionKind, kind_of
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.access.tools import Ended
from gpuvirt.hardware.programs.nvidiasmi import is_same
from gpuvirt_sim.devices.function import SimFunction
from gpuvirt_sim.devices.vgpu import SimVgpuHost
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs import smicommand, smitexts
from gpuvirt_sim.programs.smicommand import SCHEDULER, UsageError, Verb
from gpuvirt_sim.programs.smitexts import NS_PER_MS, SmiGpu, switched

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
SWITCH = {"1": True, "ENABLED": True, "0": False, "DISABLED": False}

Options = Mapping[str, str]
"""The value of each option, empty for options without one."""
Gpus = Sequence[SmiGpu]


class NvidiaSmi:
    """The program on one simulated host."""

    def __init__(self, kernel: SimKernel) -> None:
        self._kernel = kernel

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run a command, and return its outcome."""
        try:
            command = smicommand.parse(arguments)
        except UsageError as error:
            return Ended(INVALID_ARGUMENT, f"{error}\n", "")
        if "-h" in command.options:
            return Ended(0, smicommand.usage(command.verb), "")
        gpus = self._gpus(command.options.get("-i"))
        if not gpus:
            return Ended(NOT_FOUND, "No devices were found\n", "")
        actions: dict[Verb, Callable[[Gpus, Options], Ended]] = {
            (): self._plain,
            ("mig",): self._mig,
            ("vgpu",): self._vgpu,
            SCHEDULER: self._set_scheduler,
        }
        return actions[command.verb](gpus, command.options)

    def _gpus(self, chosen: str | None) -> Gpus:
        """Return the GPUs of the driver nvidia, or those that `-i` names; none where one of the names is unknown."""
        functions = [function for _, function in sorted(self._kernel.pci.functions.items()) if _is_gpu(function)]
        gpus = [SmiGpu(index, function, self._vgpu_host(function)) for index, function in enumerate(functions)]
        if chosen is None:
            return gpus
        found = [next((gpu for gpu in gpus if _is_named(name, gpu)), None) for name in chosen.split(",")]
        return [gpu for gpu in found if gpu is not None] if None not in found else []

    def _vgpu_host(self, function: SimFunction) -> SimVgpuHost | None:
        carrier = self._kernel.vfs.carriers.get(function.address)
        return carrier.vgpu_host if carrier is not None else None

    def _plain(self, gpus: Gpus, options: Options) -> Ended:
        if "-mig" in options:
            return _each(gpus, lambda gpu: self._set_mig(gpu, options["-mig"]))
        if "-L" in options:
            return _printed(smitexts.listed(gpus))
        return _printed(smitexts.query(gpus) if "-q" in options else smitexts.summary(gpus))

    def _set_mig(self, gpu: SmiGpu, mode: str) -> Ended:
        on, vgpu_host = SWITCH.get(mode.upper()), gpu.vgpu_host
        if on is None:
            return _failed(INVALID_ARGUMENT, f"{mode} is no MIG mode, which is 0 or 1")
        verb = "Enable" if on else "Disable"
        if vgpu_host is None or not vgpu_host.profiles:
            return _failed(NOT_SUPPORTED, f"Unable to {verb.lower()} MIG Mode for GPU {gpu.bus_id}")
        vgpu_host.mig_pending = on
        if vgpu_host.mig != on and (vgpu_host.live or vgpu_host.instances or self._is_open(gpu)):
            waits = f"Warning: MIG mode is in pending {verb.lower()} state for GPU {gpu.bus_id}:{WORDS[IN_USE]}"
            return Ended(0, f"{waits}\nAll done.\n", "")
        if vgpu_host.mig != on:
            vgpu_host.forget()
            self._kernel.mdev.refresh(vgpu_host)
        return Ended(0, f"{verb}d MIG Mode for GPU {gpu.bus_id}\nAll done.\n", "")

    def _is_open(self, gpu: SmiGpu) -> bool:
        return self._kernel.nvidia.is_open(gpu.function.address)

    def _mig(self, gpus: Gpus, options: Options) -> Ended:
        if "-lgip" in options and (able := [gpu for gpu in gpus if gpu.vgpu_host and gpu.vgpu_host.profiles]):
            return _printed(smitexts.profiles(able))
        in_mig_mode = [gpu for gpu in gpus if gpu.vgpu_host is not None and gpu.vgpu_host.mig]
        if not in_mig_mode:
            return Ended(NOT_FOUND, "No MIG-enabled devices found.\n", "")
        if "-cgi" in options:
            names = options["-cgi"].split(",")
            return _each(in_mig_mode, lambda gpu: _create_instances(gpu, names, computing="-C" in options))
        if "-dci" in options or "-dgi" in options:
            return _each(in_mig_mode, lambda gpu: _destroy(gpu, options))
        return _instances(in_mig_mode, options)

    def _vgpu(self, gpus: Gpus, options: Options) -> Ended:
        if options.keys() <= {"-i"}:
            return _printed(smitexts.vgpus(gpus))
        return _each(gpus, lambda gpu: _vgpu_of(gpu, options))

    def _set_scheduler(self, gpus: Gpus, options: Options) -> Ended:
        policy, time_slice = POLICIES.get(options.get("-p", "")), options.get("-t", "0")
        if policy is None or not time_slice.isdecimal():
            return _failed(INVALID_ARGUMENT, "Unable to set the scheduler state")
        desired = Scheduler(policy, int(time_slice) // NS_PER_MS or None)
        return _each(gpus, lambda gpu: self._set_scheduler_of(gpu, desired))

    def _set_scheduler_of(self, gpu: SmiGpu, desired: Scheduler) -> Ended:
        vgpu_host, what = gpu.vgpu_host, f"Unable to set the scheduler state of GPU {gpu.bus_id}"
        if vgpu_host is None or vgpu_host.mig:
            return _failed(NOT_SUPPORTED, what)
        if desired.policy is SchedulerPolicy.FIXED_SHARE and vgpu_host.mixed_sizes:
            return _failed(NOT_SUPPORTED, what)
        if any(self._in_use(vgpu) for vgpu in vgpu_host.live):
            return _failed(IN_USE, what)
        vgpu_host.scheduler = desired
        return Ended(0, f"Successfully set the scheduler state of GPU {gpu.bus_id}\n", "")

    def _in_use(self, vgpu: str) -> bool:
        return any(self._kernel.vfio.in_use(number, vgpu) for number in self._kernel.vfio.groups)


def _is_gpu(function: SimFunction) -> bool:
    is_gpu = kind_of(function.class_code, function.id.vendor) is FunctionKind.GPU
    return is_gpu and function.id.vendor == NVIDIA and function.driver == "nvidia" and function.physfn is None


def _is_named(name: str, gpu: SmiGpu) -> bool:
    if name.isdecimal():
        return int(name) == gpu.index
    if name == gpu.uuid:
        return True
    try:
        return is_same(name if name.count(":") == 2 else f"0:{name}", gpu.function.address)
    except ValueError:  # the domain is not a number
        return False


def _each(gpus: Gpus, action: Callable[[SmiGpu], Ended]) -> Ended:
    """Run an action on each GPU, and return the joined output with the exit code of the first failure."""
    ends = [action(gpu) for gpu in gpus]
    code = next((ended.exit_code for ended in ends if ended.exit_code), 0)
    return Ended(code, "".join(ended.stdout for ended in ends), "")


def _printed(lines: Iterable[str]) -> Ended:
    return Ended(0, "\n".join(lines), "")


def _failed(code: int, what: str) -> Ended:
    return Ended(code, f"{what}: {WORDS[code]}\n", "")


def _vgpu_of(gpu: SmiGpu, options: Options) -> Ended:
    vgpu_host = gpu.vgpu_host
    if vgpu_host is None:
        return _failed(NOT_SUPPORTED, f"GPU {gpu.bus_id} carries no vGPUs")
    if "-shm" in options:
        return _set_mixed_sizes(gpu, vgpu_host, options["-shm"])
    if "-ss" in options:
        return _printed(smitexts.scheduler(gpu, vgpu_host))
    creatable = [spec for spec in vgpu_host.types if any(vgpu_host.left(spec, slot) for slot in vgpu_host.slots)]
    return _printed(
        smitexts.supported(gpu, creatable if "-c" in options else vgpu_host.all_types, verbose="-v" in options)
    )


def _instances(gpus: Gpus, options: Options) -> Ended:
    if "-lci" in options:
        return _printed(smitexts.compute_instances(gpus))
    if not any(gpu.vgpu_host and gpu.vgpu_host.instances for gpu in gpus):
        return Ended(NOT_FOUND, "No GPU instances found: Not Found\n", "")
    return _printed(smitexts.instances(gpus))


def _set_mixed_sizes(gpu: SmiGpu, vgpu_host: SimVgpuHost, mode: str) -> Ended:
    on, what = SWITCH.get(mode.upper()), f"Unable to set vGPU heterogeneous mode of GPU {gpu.bus_id}"
    if on is None:
        return _failed(INVALID_ARGUMENT, f"{what} to {mode}, which is neither 0 nor 1")
    if vgpu_host.mig or not vgpu_host.can_mix_sizes:
        return _failed(NOT_SUPPORTED, what)
    if vgpu_host.live:
        return _failed(IN_USE, what)
    vgpu_host.mixed_sizes = on
    return Ended(0, f"{switched(on=on)} vGPU heterogeneous mode for GPU {gpu.bus_id}\n", "")


def _create_instances(gpu: SmiGpu, names: Sequence[str], *, computing: bool) -> Ended:
    """Create GPU instances one after another; those created before a failure stay."""
    ends: list[Ended] = []
    for name in names:
        ends.append(_create_instance(gpu, name, computing=computing))
        if ends[-1].exit_code:
            break
    return Ended(ends[-1].exit_code, "".join(ended.stdout for ended in ends), "")


def _create_instance(gpu: SmiGpu, desired: str, *, computing: bool) -> Ended:
    vgpu_host = gpu.vgpu_host
    profiles = vgpu_host.profiles if vgpu_host is not None else ()
    name, _, placement = desired.partition(":")
    profile = next((profile for profile in profiles if name in {profile.name, str(profile.id)}), None)
    start = int(placement) if placement.isdecimal() else None
    misplaced = profile is None or (":" in desired and start not in profile.starts)
    made = vgpu_host.add_instance(profile, start) if vgpu_host is not None and profile is not None else None
    if vgpu_host is None or profile is None or made is None:
        code = INVALID_ARGUMENT if misplaced else INSUFFICIENT_RESOURCES
        what = f"Unable to create a GPU instance on GPU {gpu.index:>2} using profile {desired}: {WORDS[code]}"
        return _failed(code, f"{what}\nFailed to create GPU instances")
    named = f"profile MIG {profile.name} (ID {profile.id:>2})"
    output = f"Successfully created GPU instance ID {made.id:>2} on GPU {gpu.index:>2} using {named}\n"
    if computing:
        vgpu_host.computing.add(made.id)
        place = f"GPU {gpu.index:>2} GPU instance ID {made.id:>2}"
        output += f"Successfully created compute instance ID  0 on {place}\n"
    return Ended(0, output, "")


def _destroy(gpu: SmiGpu, options: Options) -> Ended:
    """Destroy the instances that `-gi` names, or all."""
    vgpu_host = gpu.vgpu_host
    if vgpu_host is None:
        return _failed(NOT_FOUND, "No GPU instances found")
    requested = options.get("-gi")
    if requested is None:
        instances = [instance.id for instance in vgpu_host.instances]
        numbers = sorted(vgpu_host.computing) if "-dci" in options else instances
    elif all(number.isdecimal() for number in requested.split(",")):
        numbers = [int(number) for number in requested.split(",")]
    else:
        return _failed(INVALID_ARGUMENT, f"{requested} is no list of GPU instance IDs")
    if not numbers:
        return _failed(NOT_FOUND, f"No {'compute' if '-dci' in options else 'GPU'} instances found")
    destroy = _destroy_computing if "-dci" in options else _destroy_instance
    ends = [destroy(gpu, vgpu_host, number) for number in numbers]
    code = next((ended.exit_code for ended in ends if ended.exit_code), 0)
    return Ended(code, "".join(ended.stdout for ended in ends), "")


def _destroy_computing(gpu: SmiGpu, vgpu_host: SimVgpuHost, number: int) -> Ended:
    if number not in vgpu_host.computing:
        return Ended(NOT_FOUND, "No compute instances found: Not Found\n", "")
    vgpu_host.computing.remove(number)
    place = f"GPU {gpu.index:>2} GPU instance ID {number:>2}"
    return Ended(0, f"Successfully destroyed compute instance ID  0 from {place}\n", "")


def _destroy_instance(gpu: SmiGpu, vgpu_host: SimVgpuHost, number: int) -> Ended:
    found = next((instance for instance in vgpu_host.instances if instance.id == number), None)
    if found is None or number in {*vgpu_host.on_instance.values(), *vgpu_host.computing}:
        code = NOT_FOUND if found is None else IN_USE
        what = f"Unable to destroy GPU instance ID {number:>2} from GPU {gpu.index:>2}: {WORDS[code]}"
        return _failed(code, f"{what}\nFailed to destroy GPU instances")
    vgpu_host.instances.remove(found)
    return Ended(0, f"Successfully destroyed GPU instance ID {number:>2} from GPU {gpu.index:>2}\n", "")
