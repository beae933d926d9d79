"""The interface of a back end in the child: the same for each hypervisor, synchronous, for several threads at once."""

from collections.abc import Sequence
from typing import Protocol

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.workers.hypervisor import Abilities, Call, VmKey, WorkerVm
from gpuvirt_schedules.hypervisors.messages import Problem


class BackEndError(GpuvirtError):
    """A request to a hypervisor failed."""

    def __init__(self, problem: Problem, text: str, *, is_certain: bool) -> None:
        """`is_certain`: the hypervisor has certainly not carried out the call, and will not."""
        super().__init__(f"{problem}: {text}")
        self.problem = problem
        self.text = text
        self.is_certain = is_certain


class BackEnd(Protocol):
    """The client of one hypervisor, which connects with the first request. All methods raise BackEndError."""

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs."""
        ...

    def make(self, call: Call) -> None:
        """Make a call once; return when the hypervisor has accepted it."""
        ...

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return the possible actions on these VMs, without VMs that do not exist. Codes are a `Problem`."""
        ...
