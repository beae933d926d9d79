"""The back end of a vCenter."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pyVmomi import vim

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.vsphere.calling import make
from gpuvirt.hypervisors.vsphere.checking import check
from gpuvirt.hypervisors.vsphere.faults import problem_of
from gpuvirt.hypervisors.vsphere.reading import Reader
from gpuvirt.hypervisors.vsphere.session import Session
from gpuvirt.model.schedules.hypervisor import Abilities, Call, VmKey, WorkerVm

T = TypeVar("T")


class VSphere:
    """The client of one vCenter, or of one ESX host."""

    def __init__(self, server: str, ca: str, user: str, password: str) -> None:
        """Connect to nothing yet."""
        self._session = Session(server, ca, user, password)
        self._reader = Reader()

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs that the user may see; raises BackEndError."""
        return self._session.run(_asking(self._reader.read))

    def make(self, call: Call) -> None:
        """Make a call; raises BackEndError."""
        self._session.run(lambda content: make(content, call))

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return what can be done with these VMs; raises BackEndError."""
        return self._session.run(_asking(lambda content: check(content, vms)))


def _asking(ask: Callable[[vim.ServiceInstanceContent], T]) -> Callable[[vim.ServiceInstanceContent], T]:
    """Return a function that changes nothing, whose errors are BackEndErrors."""

    def asked(content: vim.ServiceInstanceContent) -> T:
        try:
            return ask(content)
        except BackEndError:
            raise
        except Exception as error:
            raise problem_of(error, is_certain=True) from error

    return asked
