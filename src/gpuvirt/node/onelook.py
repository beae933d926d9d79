"""A node's picture without an agent: one look at the host, by hand."""

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import BootId
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import BOOT_ID, scan, with_users
from gpuvirt.model.ledger import Ledger
from gpuvirt.model.pciids import PciIds
from gpuvirt.model.settings import Settings
from gpuvirt.model.view import NodeView
from gpuvirt.node.state import NodeState


def take(kernel: Kernel, settings: Settings, ids: PciIds, clock: Clock) -> NodeView:
    """Return what the host shows now and what an agent would offer of it; who holds what is not known."""
    state = NodeState(settings, ids, Ledger(), agent=None)
    state.hear_facts(with_users(kernel, scan(kernel)))
    return state.refresh(clock.monotonic_s(), clock.now())


def boot_id(kernel: Kernel) -> BootId | None:
    """Return which boot of the host this is."""
    found = attributes.text(kernel, BOOT_ID)
    return BootId(found) if isinstance(found, str) else None
