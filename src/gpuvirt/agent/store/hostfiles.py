"""The files of a host that agents and commands update in turn: the driver journal, and the tenants of GPUs."""

from pathlib import Path

from gpuvirt.agent.store.persisted import Persisted
from gpuvirt.agent.store.stateformat import DigestField, Format
from gpuvirt.model.allocation.tenancy import Tenancies
from gpuvirt.model.change.state import DriverJournal
from gpuvirt.paths import HostPath

DRIVERS = HostPath("/var/lib/gpuvirt/drivers.json")
TENANCIES = "tenancy.json"

JOURNAL_FORMAT = Format(DriverJournal, DigestField(), version=2)
TENANCIES_FORMAT = Format(Tenancies, DigestField())

LOCK_TRIES = 5_000
"""How often the lock of the tenants is tried, some milliseconds in all: a holder needs a fraction of one."""


def journal(path: Path) -> Persisted[DriverJournal]:
    """Return the driver journal in a file: each change of a driver is written to it before the change is made."""
    return Persisted(path, JOURNAL_FORMAT, DriverJournal(), lost=DriverJournal(damaged=True))


def tenancies(path: Path) -> Persisted[Tenancies]:
    """Return the tenants of GPUs in a file.

    The agent writes it before it answers Allocate, commands and changes of drivers write it before they change a
    driver. The records concern one boot. So the file is replaced atomically, but not synced: a killed process loses
    nothing, and after a power cut the records no longer matter. A process that is stopped while it has the lock must
    not stop Allocate, so nobody waits long for the lock.
    """
    lost = Tenancies(lost=True)
    return Persisted(path, TENANCIES_FORMAT, Tenancies(), lost, durable=False, lock_tries=LOCK_TRIES)


def tenancies_beside(path: Path) -> Persisted[Tenancies]:
    """Return the tenants of GPUs in the folder of another file: of the driver journal, or of the ledger."""
    return tenancies(path.with_name(TENANCIES))
