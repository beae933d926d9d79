"""The back end of a host with libvirt."""

from collections.abc import Sequence

from gpuvirt.hypervisors.libvirt import checking, reading
from gpuvirt.hypervisors.libvirt.calling import make
from gpuvirt.hypervisors.libvirt.running import Running
from gpuvirt.hypervisors.libvirt.session import Session
from gpuvirt.model.schedules.hypervisor import Abilities, Call, VmKey, WorkerVm


class Libvirt:
    """The client of one host."""

    def __init__(self, server: str, ca: str, certificate: str, key: str) -> None:
        """Connect to nothing yet."""
        self._session = Session(server, ca, certificate, key)
        self._running = Running()

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs; raises BackEndError."""
        return self._session.run(lambda connection: reading.read(connection, self._running))

    def make(self, call: Call) -> None:
        """Make a call; raises BackEndError."""
        make(self._session, self._running, call)

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return what can be done with these VMs; raises BackEndError."""
        return self._session.run(lambda connection: checking.check(connection, vms))
