"""The gate that each allocation of a device passes: changes by other processes and by this one exclude allocations.

Device plugins and shares of GPUs record their allocations here, so that no change of a device can miss one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from msgspec.structs import replace

from gpuvirt.agent.change.gate.drainrequest import NoGate
from gpuvirt.agent.change.gate.gate import Gate
from gpuvirt.agent.change.gate.gatelock import UnitBusyError, why_not_passed
from gpuvirt.agent.change.steps.changes import Changes
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.devices.candidates import Target

DevicesBySlot = Mapping[str, Sequence[DeviceId]]


class AllocationGate:
    """Records the allocations of one process."""

    def __init__(self, changes: Changes, gate: Callable[[], Gate | NoGate]) -> None:
        """`gate` returns the present gate of the agent."""
        self._changes = changes
        self._gate = gate

    def allocate(
        self,
        subject: str,
        devices: DevicesBySlot,
        targets: Sequence[tuple[str, Target]],
        record: Callable[[], None],
    ) -> None:
        """Record an allocation of devices by calling `record`, or raise RefusedError because a change has one of them.

        `devices` are the ids that the kubelet's accounts will show, by PCI slot: changes by other processes wait until
        they do. `targets` are the devices themselves, with the subjects of reasons. An error of `record` is raised.
        """
        with self._passed(subject, devices):
            self._changes.allocate(targets, record)

    @contextmanager
    def creation(
        self, device: DeviceId, target: Target, slot: str, record: Callable[[], None]
    ) -> Iterator[tuple[int, ...]]:
        """Keep changes away from a vGPU while it is created; `record` records its allocation first.

        Gives the descriptors that the process of the write keeps open. Raises RefusedError because a change may touch
        the GPU, and where the gates can't be written: then no other process would see the creation.
        """
        gate = self._gate()
        if isinstance(gate, NoGate):
            raise RefusedError(replace(gate.why, subject=target.gpu))
        try:
            with gate.creation(slot, device) as lock:
                self._changes.allocate([(device, target)], record)
                yield (lock,)
        except UnitBusyError as error:
            raise RefusedError(why_not_passed(target.gpu, error)) from error

    def _passed(self, subject: str, devices: DevicesBySlot) -> AbstractContextManager[None]:
        """Keep other processes from changing devices of these slots; raise RefusedError if one does, or may do."""
        match self._gate():
            case NoGate():  # every command refuses the devices that this agent lists
                return nullcontext()
            case gate:
                pass
        try:
            return gate.allocation(devices)
        except UnitBusyError as error:
            raise RefusedError(why_not_passed(subject, error)) from error
