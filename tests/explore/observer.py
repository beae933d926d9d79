"""Checks the operations of a schedule against the true state of the simulated kernel and the kubelet."""

import re
from collections.abc import Callable, Iterator

from typing_extensions import override

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.paths import HostPath
from gpuvirt.sim.kernel import OUR_PID, SimKernel
from tests.explore.kubelet import Kubelet, Pod
from tests.explore.scheduler import KilledError, Process, Scheduler
from tests.explore.seam import Watch

_FUNCTION = re.compile(r"/sys/bus/pci/devices/([0-9a-f:.]+)/(\w+)\Z")
_UNBIND = re.compile(r"/sys/bus/pci/drivers/([^/]+)/unbind\Z")
_MDEV = re.compile(r"/([0-9a-f-]{36})/remove\Z")

NATIVE_USER = "python3"
"""The name of a process that has a GPU open through its native driver."""


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
    ) -> None:
        self._now = kernel
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._desired_by = desired_by
        self._seen_open: dict[Process, set[PciAddress]] = {}
        """The GPUs whose native driver had clients when a process last read all processes."""
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
            self._judge(process, f"unbind {text}", self.with_dependents(PciAddress(text)))
        elif (mdev := _MDEV.search(path)) is not None:
            self._judge(process, f"remove {mdev[1]}", {mdev[1]})
        elif (found := _FUNCTION.fullmatch(path)) is not None:
            self._write_to_function(process, PciAddress(found[1]), found[2], text)

    def _write_to_function(self, process: Process, address: PciAddress, attribute: str, text: str) -> None:
        if attribute in {"remove", "reset"} or (attribute == "sriov_numvfs" and text == "0"):
            self._judge(process, f"{attribute} of {address}", self.with_dependents(address))

    @override
    def command(self, process: Process, *command: str) -> None:
        if command[0] == "sriov-manage":
            address = PciAddress(command[-1])
            if command[1] == "-d" or not self._now().pci.functions[address].virtfns:
                self._judge(process, " ".join(command), self.with_dependents(address), locks=True)

    @override
    def walk(self, process: Process) -> None:
        kernel = self._now()
        self._seen_open[process] = {one for one in kernel.pci.functions if kernel.nvidia.is_open(one)}

    def with_dependents(self, address: PciAddress) -> set[str]:
        """Return a function with its VFs, its vGPUs and the members of its IOMMU group."""
        kernel = self._now()
        function = kernel.pci.functions.get(address)
        if function is None:
            return {address}
        found: set[str] = {address, *function.virtfns}
        found |= {device for device, mdev in kernel.mdev.devices.items() if mdev.slot in found}
        for device in list(found):
            member = kernel.pci.functions.get(PciAddress(device))
            if member is not None and member.group is not None:
                found |= kernel.vfio.groups[member.group].members
        return found

    def _judge(self, process: Process, operation: str, devices: set[str], *, locks: bool = False) -> None:
        """Assert that no pod and no process has a device that an operation removes.

        A program that `locks` a GPU by its native driver fails while the driver has clients, and harms none of them:
        it may only not be started after the last read of /proc has found a client.
        """
        self.operations += 1
        for pod in self._kubelet.pods.values():
            if pod.has_devices and (taken := self.devices_of(pod) & devices):
                self.violated("harm", f"{process.name}: {operation}, while {pod.name} has {', '.join(sorted(taken))}")
        for device in sorted(devices):
            for user in self.users(device):
                if locks and user == NATIVE_USER and device not in self._seen_open.get(process, ()):
                    continue
                self.violated("harm", f"{process.name}: {operation}, while {user} has {device} open")

    def devices_of(self, pod: Pod) -> set[str]:
        """Return the devices of a pod and all members of their groups."""
        kernel = self._now()
        found = {str(device) for _, device in pod.keys} | pod.functions
        for number in pod.groups:
            group = kernel.vfio.groups.get(IommuGroup(number))
            found |= group.members if group is not None else set()
        return found

    def users(self, device: str) -> Iterator[str]:
        """Yield the processes, except gpuvirt's, that have a device or its group open."""
        kernel = self._now()
        if ":" in device:
            address = PciAddress(device)
            function = kernel.pci.functions.get(address)
            group = function.group if function is not None else None
            if kernel.nvidia.is_open(address):
                yield NATIVE_USER
        else:
            mdev = kernel.mdev.devices.get(device)
            group = mdev.group if mdev is not None else None
        found = kernel.vfio.groups.get(group) if group is not None else None
        if found is not None and device in found.vfio_devices and found.user not in {None, OUR_PID}:
            yield f"a VM (pid {found.user})"
        for file in kernel.vfio._cdevs.of_device(device):
            if file.pid != OUR_PID:
                yield f"a VM (pid {file.pid})"

    def given(self, pod: Pod, *, disturbed: bool) -> None:
        """Check the devices that a pod just got.

        If the allocation was `disturbed`, since an actor took a device or started a VM by hand meanwhile, a check
        right before that is as good as an answer right before it: then only other pods count.
        """
        kernel = self._now()
        for other in self._kubelet.pods.values():
            if other is not pod and other.has_devices and (shared := self.devices_of(other) & self.devices_of(pod)):
                self.violated("shared", f"{other.name} and {pod.name} both have {', '.join(sorted(shared))}")
        if not disturbed:
            self._verify_usable(pod, kernel)

    def _verify_usable(self, pod: Pod, kernel: SimKernel) -> None:
        for device in sorted(self.devices_of(pod)):
            for user in self.users(device):
                self.violated("given", f"{pod.name} was given {device}, which {user} has open")
        for member in sorted(self.devices_of(pod)):
            near = kernel.pci.functions.get(PciAddress(member))
            if near is not None and not kernel._is_friendly(member):
                self.violated("given", f"{pod.name} was given the group of {member}, which is on {near.driver}")
        for _, device in pod.keys:
            function = kernel.pci.functions.get(PciAddress(device))
            if function is not None and (function.driver is None or "vfio" not in function.driver):
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
