"""A node's picture without an agent: one look at the host, by hand."""

from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import BootId
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import BOOT_ID, scan, with_users
from gpuvirt.model.allocation.ledger import KubeletAccount, Ledger
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.view import NodeView
from gpuvirt.node.known.state import NodeState
from gpuvirt.node.store import journal

EMPTY = Ledger()


def read_ledger(*paths: Path) -> Ledger:
    """Return the ledger that an agent keeps in the first of `paths` that is there, an empty one where it can't be read.

    It is only read: a damaged one is the agent's to put aside.
    """
    try:
        return load_ledger(*paths)
    except (OSError, DamagedError):
        return EMPTY


def load_ledger(*paths: Path) -> Ledger:
    """Return the ledger in the first of `paths` that is there, else an empty one; raise OSError, DamagedError."""
    for path in paths:
        try:
            return journal.decode(path.read_bytes())[0]
        except FileNotFoundError:
            continue
    return EMPTY


def take(kernel: Kernel, settings: Settings, ids: PciIds, clock: Clock, ledger: Ledger = EMPTY) -> NodeView:
    """Return what the host shows now and what an agent would offer of it; `ledger` says what pods have."""
    return picture(with_users(kernel, scan(kernel)), settings, ids, clock, ledger)


def picture(facts: Facts, settings: Settings, ids: PciIds, clock: Clock, ledger: Ledger = EMPTY) -> NodeView:
    """Return what an agent would offer of a host that shows these facts."""
    state = NodeState(settings, ids, ledger, agent=None)
    state.ledger.expect_no_account(KubeletAccount(clock.now(), {}))
    state.observe_facts(facts)
    return state.refresh(clock.monotonic_s(), clock.now())


def boot_id(kernel: Kernel) -> BootId | None:
    """Return which boot of the host this is."""
    found = attributes.text(kernel, BOOT_ID)
    return BootId(found) if isinstance(found, str) else None
