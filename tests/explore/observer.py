"""Checks the operations of a schedule against the true state of the simulated kernel and the kubelet."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from typing_extensions import override

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.drivers import is_vfio
from gpuvirt_sim.files.processes import Process as SimProcess
from gpuvirt_sim.kernel import OUR_PID, SimKernel
from tests.explore.kubelet import Kubelet, Pod
from tests.explore.scheduler import KilledError, Process, Scheduler, Strand
from tests.explore.seam import Watch

_FUNCTION = re.compile(r"/sys/bus/pci/devices/([0-9a-f:.]+)/(\w+(?:/\w+)?)\Z")
_PROBE = re.compile(r"/sys/bus/pci/(?:drivers_probe|drivers/[^/]+/bind)\Z")
_UNBIND = re.compile(r"/sys/bus/pci/drivers/([^/]+)/unbind\Z")
_MDEV = re.compile(r"/([0-9a-f-]{36})/remove\Z")

_CREATE = re.compile(r"/mdev_supported_types/[^/]+/create\Z")

CURRENT_TYPE = "nvidia/current_vgpu_type"
"""The attribute of a VF that removes its vGPU when 0 is written (vendor VFIO)."""


UNITS = 2
"""The units of a GPU that is shared."""


class ViolationError(Exception):
    """An invariant was violated; `kind` names it."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Observer(Watch):
    """Checks the operations of processes on the host."""

    def __init__(
        self,
        kernel: Callable[[], SimKernel],
        kubelet: Kubelet,
        scheduler: Scheduler,
        desired_by: Callable[[Process], str | None],
        *,
        judges_count: bool = False,
    ) -> None:
        self._now = kernel
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._desired_by = desired_by
        self._judges_count = judges_count
        self._seen_open: dict[Process, frozenset[int]] = {}
        """The native users that a process saw when it last read all processes, by their pids."""
        self._walks: dict[Strand, tuple[int, frozenset[int]]] = {}
        """The same of each strand, with the number of its operations up to then."""
        self._memory: dict[PciAddress, tuple[bool, str]] = {}
        """The last tenant of each GPU since the host booted: whether it had the GPU whole, by VFIO, and its pod."""
        self.forced: set[Process] = set()
        """The commands that may take devices from native users, by the admin's order; never from VFIO's users."""
        self.may_be_given_again: set[PciAddress] = set()
        """The GPUs of pods that had not ended when the host was rebooted."""
        self._pods_at_read: dict[Strand, frozenset[str]] = {}
        """The pods in the kubelet's account when each strand last read it, until its next destructive operation."""
        self.operations = 0
        """The number of checked destructive operations."""

    @override
    def desired_by(self, process: Process) -> str | None:
        return self._desired_by(process)

    @override
    def write(self, process: Process, path: HostPath, data: bytes, desired: str | None) -> None:
        text = data.decode().strip()
        if (driver := _UNBIND.search(path)) is not None:
            if desired == ("passthrough" if "vfio" in driver[1] else "container"):
                self.violated("undesired", f"{process.name}: unbind {text} from {driver[1]}, and {desired} is desired")
            self._judge(process, f"unbind {text}", PciAddress(text))
        elif (mdev := _MDEV.search(path)) is not None:
            self._judge_all(process, f"remove {mdev[1]}", {mdev[1]}, {mdev[1]})
        elif _CREATE.search(path) is not None:
            self._judge_creation(process, HostPath(path.removesuffix("create") + "available_instances"), text)
        elif _PROBE.search(path) is not None:
            function = self._now().pci.functions.get(PciAddress(text))
            vfs = set[str](function.virtfns) if function is not None else set[str]()
            self._judge_all(process, f"probe {text}", vfs, vfs)
        elif (found := _FUNCTION.fullmatch(path)) is not None:
            self._write_to_function(process, PciAddress(found[1]), found[2], text)

    def _judge_creation(self, process: Process, left: HostPath, vgpu: str) -> None:
        """Assert that a GPU has room for a vGPU; a worker that woke too late makes one for no pod, or is refused."""
        if self._kubelet.is_admitting and int(self._now().read(left)) < 1:
            self.violated("overcommitted", f"{process.name}: create {vgpu}, for which the GPU has no room")

    def _write_to_function(self, process: Process, address: PciAddress, attribute: str, text: str) -> None:
        if attribute in {"remove", "reset"} or (attribute in {"sriov_numvfs", CURRENT_TYPE} and text == "0"):
            self._judge(process, f"write {text} to {attribute} of {address}", address)

    @override
    def command(self, process: Process, *command: str) -> None:
        match command:
            case ("sriov-manage", switch, address):
                if switch == "-d" or not self._now().pci.functions[PciAddress(address)].virtfns:
                    self._judge(process, " ".join(command), PciAddress(address), locks=True)
            case ("nvidia-smi", "-i", address, "-mig", _):
                self._judge(process, " ".join(command), PciAddress(address), locks=True)
            case ("nvidia-smi", "vgpu", "-i", address, "-shm", _):
                self._judge(process, " ".join(command), PciAddress(address), locks=True)
            case ("nvidia-smi", "mig", "-i", address, "-dci" | "-dgi" as word, "-gi", number):
                gpu = PciAddress(address)
                carried = self._on_instance(gpu, int(number))
                # A process with the GPU's node open uses no instance by that; the driver knows the clients of each.
                self._judge_all(process, " ".join(command), {gpu, *carried}, carried, locks=True, ends=word == "-dgi")
            case ("nvidia-smi", "vgpu", "set-scheduler-state", "-i", address, *_):
                vgpus = self._vgpus(PciAddress(address))
                self._judge_all(process, " ".join(command), {address}, {address, *vgpus}, locks=True)
            case _:
                return

    def _vgpus(self, gpu: PciAddress) -> Mapping[str, int | None]:
        """Return the vGPUs of a GPU, each with its GPU instance."""
        carrier = self._now().vfs.carriers.get(gpu)
        host = carrier.vgpu_host if carrier is not None else None
        return {vgpu: host.on_instance.get(vgpu) for vgpu in host.live} if host is not None else {}

    def _on_instance(self, gpu: PciAddress, number: int) -> set[str]:
        return {vgpu for vgpu, instance in self._vgpus(gpu).items() if instance == number}

    @override
    def walk(self, process: Process) -> None:
        kernel, strand = self._now(), self._scheduler.current
        users = frozenset(user.pid for address in kernel.pci.functions for user in kernel.native_users(address))
        self._seen_open[process] = users
        self._walks[strand] = strand.operations, users

    def read_account(self) -> None:
        """Note that the running strand reads the kubelet's account."""
        known = frozenset(pod.name for pod in self._kubelet.pods.values() if pod.known)
        self._pods_at_read[self._scheduler.current] = known

    def own(self, address: PciAddress) -> set[str]:
        """Return a function with its VFs and its vGPUs: what it takes with it."""
        kernel = self._now()
        function = kernel.pci.functions.get(address)
        found: set[str] = {address, *(function.virtfns if function is not None else ())}
        return found | {device for device, mdev in kernel.mdev.devices.items() if mdev.slot in found}

    def with_dependents(self, address: PciAddress) -> set[str]:
        """Return a function with its VFs, its vGPUs and the members of its IOMMU group."""
        kernel, found = self._now(), self.own(address)
        for device in list(found):
            member = kernel.pci.functions.get(PciAddress(device))
            if member is not None and member.group is not None:
                found |= kernel.vfio.groups[member.group].members
        return found

    def _judge(self, process: Process, operation: str, address: PciAddress, *, locks: bool = False) -> None:
        self._judge_all(process, operation, self.with_dependents(address), self.own(address), locks=locks)

    def _judge_all(
        self,
        process: Process,
        operation: str,
        devices: set[str],
        own: set[str],
        *,
        locks: bool = False,
        ends: bool = True,
    ) -> None:
        """Assert that no pod and no process has a device that an operation removes.

        VFIO's users lose their device with any of its group, native users only with a device of their `own`. A program
        that `locks` a GPU by its native driver fails while the driver has clients, and harms none of them: it may only
        not be started after the last read of /proc has found a client. No read of /proc can exclude a native user that
        comes between the read and the write: that is no harm if the write is the first operation after the read. The
        same holds for a pod of another plugin that gets its device after the kubelet's account was read for the step,
        which this operation `ends`.
        """
        self.operations += 1
        known = self._known_pods(ends=ends)
        if self._judges_count:
            self._judge_count(process, operation, devices)
        for pod in self._kubelet.pods.values():
            if pod.by_other and known is not None and pod.name not in known:
                continue
            if pod.has_devices and (taken := (self.devices_of(pod) - self._awaited_by(pod)) & devices):
                self.violated("harm", f"{process.name}: {operation}, while {pod.name} has {', '.join(sorted(taken))}")
        seen = self._seen_open.get(process, frozenset()) if locks else self._just_seen()
        for device in sorted(devices):
            for user in self.vfio_users(device):
                self.violated("harm", f"{process.name}: {operation}, while {user} has {device} open")
        for device in sorted(own) if process not in self.forced else ():
            for native in self._native_users(device):
                if seen is None or native.pid in seen:
                    self.violated("harm", f"{process.name}: {operation}, while {native.command} has {device} open")

    def _known_pods(self, *, ends: bool) -> frozenset[str] | None:
        """Return the pods in the account that the running strand's step has read; `ends`: forget it after that."""
        strand = self._scheduler.current
        return self._pods_at_read.pop(strand, None) if ends else self._pods_at_read.get(strand)

    def _just_seen(self) -> frozenset[int] | None:
        """Return the native users at the running strand's read of all processes, if nothing came after it."""
        strand = self._scheduler.current
        operations, users = self._walks.get(strand, (None, frozenset[int]()))
        return users if operations is not None and strand.operations == operations + 1 else None

    def _judge_count(self, process: Process, operation: str, devices: set[str]) -> None:
        """Assert that the kubelet admits no pod by its count with a device that an operation removes."""
        for resource, counted in self._kubelet.lists.items() if self._kubelet.up else ():
            for device, is_healthy in counted.items():
                if is_healthy and device in devices:
                    self.violated("counted", f"{process.name}: {operation}, while the kubelet counts it as {resource}")

    def devices_of(self, pod: Pod) -> set[str]:
        """Return the devices of a pod and all members of their groups."""
        kernel = self._now()
        found = {str(device) for _, device in pod.keys if not is_on_demand_id(device)} | pod.functions | pod.vgpus
        for number in pod.opened_groups:
            group = kernel.vfio.groups.get(IommuGroup(number))
            found |= group.members if group is not None else set()
        return found

    def _awaited_by(self, pod: Pod) -> set[str]:
        """Return the whole GPUs that a pod from before a reboot had by VFIO, and that have another driver since."""
        functions = self._now().pci.functions
        own = (PciAddress(device) for _, device in pod.keys if pod.rebooted and not (pod.started or pod.vgpus))
        return {device for device in own if device in functions and not is_vfio(functions[device].driver)}

    def users(self, device: str) -> Iterator[str]:
        """Yield the processes, except gpuvirt's, that have a device or its group open."""
        yield from (user.command for user in self._native_users(device))
        yield from self.vfio_users(device)

    def _native_users(self, device: str) -> Sequence[SimProcess]:
        return self._now().native_users(PciAddress(device)) if ":" in device else ()

    def vfio_users(self, device: str) -> Iterator[str]:
        """Yield the processes, except gpuvirt's, that have a device open as a VM has."""
        kernel = self._now()
        function, mdev = kernel.pci.functions.get(PciAddress(device)), kernel.mdev.devices.get(device)
        group = function.group if function is not None else mdev.group if mdev is not None else None
        found = kernel.vfio.groups.get(group) if group is not None else None
        if found is not None and device in found.vfio_devices and found.user not in {None, OUR_PID}:
            yield f"a VM (pid {found.user})"
        for file in kernel.vfio._cdevs.of_device(device):
            if file.pid != OUR_PID:
                yield f"a VM (pid {file.pid})"

    def reboot(self) -> None:
        """Reset all GPUs. Pods that have not ended may get theirs again, as soon as the kubelet restarts them."""
        pods = {pod.name for pod in self._kubelet.pods.values() if pod.has_devices}
        self.may_be_given_again |= {gpu for gpu, (_, pod) in self._memory.items() if pod in pods}
        self._memory.clear()

    def given_natively(self, pod: Pod, gpu: PciAddress) -> None:
        """Check that a pod that just got a GPU by its native driver gets no memory of a VM."""
        self._verify_reset(pod, gpu, whole=False)

    def _verify_reset(self, pod: Pod, gpu: PciAddress, *, whole: bool) -> None:
        """Check that a GPU is reset between tenants; those of one native driver follow each other without a reset."""
        former = self._memory.get(gpu, (whole, pod.name))[1]
        keeps_memory = self.keeps_memory(gpu, whole=whole)
        self._memory[gpu] = whole, pod.name
        if former != pod.name and keeps_memory:
            self.violated("unreset", f"{pod.name} was given {gpu} with the memory of {former}")

    def keeps_memory(self, gpu: PciAddress, *, whole: bool) -> bool:
        """Return whether a pod that gets a GPU, whole or not, would get the memory of the last one."""
        if gpu not in self._memory or not (whole or self._memory[gpu][0]):
            return False
        tree, folder = self._now().tree, self._now().pci.functions[gpu].folder
        return not any(tree.exists(HostPath(f"{folder}/{name}")) for name in ("reset_method", "reset"))

    def given(self, pod: Pod, *, disturbed: bool) -> None:
        """Check the devices that a pod just got.

        If the allocation was `disturbed`, since an actor took a device or started a VM by hand meanwhile, a check
        right before that is as good as an answer right before it: then only other pods count.
        """
        kernel = self._now()
        self.verify_unshared(pod)
        for device in self._own_of(pod):
            mdev = kernel.mdev.devices.get(device)
            if mdev is not None or PciAddress(device) in kernel.pci.functions:
                gpu = self._physical(mdev.slot if mdev is not None else PciAddress(device))
                self._verify_reset(pod, gpu, whole=not self._is_vgpu(device))
        if not disturbed:
            self._verify_usable(pod, kernel)

    def verify_unshared(self, pod: Pod) -> None:
        """Check that no other pod has a device of a pod, or of its groups."""
        for other in self._kubelet.pods.values():
            if other is not pod and other.has_devices and (shared := self.devices_of(other) & self.devices_of(pod)):
                kind = "given twice" if other.by_other else "shared"
                self.violated(kind, f"{other.name} and {pod.name} both have {', '.join(sorted(shared))}")

    def _own_of(self, pod: Pod) -> list[str]:
        """Return the devices that a pod requested, by the kernel's ids of them."""
        return sorted(pod.vgpus) or [str(device) for _, device in pod.keys]

    def _is_vgpu(self, device: str) -> bool:
        """Return whether a device is a vGPU: a mediated device, or a VF with a type of vendor VFIO."""
        return any(device in carrier.vgpu_host.live for carrier in self._now().vfs.carriers.values())

    def _physical(self, address: PciAddress) -> PciAddress:
        """Return the PF of a function: a GPU's VFs have its memory."""
        return self._now().pci.functions[address].physfn or address

    def given_share(self, pod: Pod) -> None:
        """Check the GPU of a container that just started: it has its driver, and units for all that run."""
        kernel = self._now()
        for gpu in sorted(pod.functions):
            function = kernel.pci.functions.get(PciAddress(gpu))
            if function is None or function.driver != "nvidia":
                found = "is not there" if function is None else f"is on {function.driver or 'no driver'}"
                self.violated("given", f"{pod.name} starts with {gpu}, which {found}")
            sharers = [other for other in self._kubelet.pods.values() if gpu in other.functions and not other.ended]
            units = sum(len(other.keys) for other in sharers)
            if units > UNITS:
                names = ", ".join(sorted(other.name for other in sharers))
                self.violated("shared", f"{names} run with {units} units of {gpu}, which has {UNITS}")

    def _verify_usable(self, pod: Pod, kernel: SimKernel) -> None:
        for device in sorted(self.devices_of(pod)):
            for user in self.users(device):
                self.violated("given", f"{pod.name} was given {device}, which {user} has open")
        for member in sorted(self.devices_of(pod)):
            near = kernel.pci.functions.get(PciAddress(member))
            if near is not None and not kernel._is_friendly(member):
                self.violated("given", f"{pod.name} was given the group of {member}, which is on {near.driver}")
        for device in self._own_of(pod):
            function = kernel.pci.functions.get(PciAddress(device))
            on_vfio = function is not None and function.driver is not None and "vfio" in function.driver
            if function is not None and not on_vfio and not self._is_vgpu(device):
                self.violated("given", f"{pod.name} was given {device}, which is on {function.driver or 'no driver'}")
            if function is None and device not in kernel.mdev.devices:
                self.violated("given", f"{pod.name} was given {device}, which is not there")

    def violated(self, kind: str, what: str) -> None:
        """End the schedule: the running strand has violated an invariant."""
        self.fail(kind, what)
        raise KilledError

    def fail(self, kind: str, what: str) -> None:
        """End the schedule soon: an invariant was violated."""
        self._scheduler.fail(ViolationError(kind, what))
