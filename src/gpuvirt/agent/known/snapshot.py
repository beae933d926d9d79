"""The view of a node without an agent, from one observation of the host, for commands."""

from pathlib import Path

from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.store import agentstate
from gpuvirt.clock import Clock
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.ids import BootId
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import PCI_DEVICES
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.scan import BOOT_ID, scan, with_users
from gpuvirt.model.allocation.ledger import KubeletAccount, Ledger
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.naming import Learn, TypeNames, observed_names
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.view import NodeView

EMPTY = Ledger()


def read_ledger(*paths: Path) -> Ledger:
    """Return the ledger in the first of `paths` that exists, an empty one if it can't be read.

    A damaged file stays in place; the agent renames it when it starts.
    """
    try:
        return load_ledger(*paths)
    except (OSError, DamagedError):
        return EMPTY  # unknown: a view for people; changes read it by `load_ledger`


def load_ledger(*paths: Path) -> Ledger:
    """Return the ledger in the first of `paths` that exists, else an empty one; raise OSError, DamagedError."""
    for path in paths:
        try:
            return agentstate.LEDGER.decode(path.read_bytes())[0]
        except FileNotFoundError:
            continue  # unknown: nothing, the file does not exist
    return EMPTY


def take(
    kernel: Kernel,
    settings: Settings,
    ids: PciIds,
    clock: Clock,
    ledger: Ledger = EMPTY,
    learn: Learn = observed_names,
) -> NodeView:
    """Observe the host; return its view, with what an agent would offer. `ledger` has the allocations to pods.

    Raises GpuvirtError where the devices of the host can't be listed, which does not say that it has none.
    """
    listed = attributes.names(kernel, PCI_DEVICES)
    if not isinstance(listed, list):
        problem = "is not there" if listed is None else f"could not be read ({listed.detail})"
        raise GpuvirtError(
            f"{PCI_DEVICES} {problem}, so the GPUs of this host are unknown; check --host-root, below which the host's"
            " /sys must be"
        )
    facts = with_users(kernel, scan(kernel))
    return view_of(facts, settings, ids, clock, ledger, learn(facts, ledger.names))


def view_of(facts: Facts, settings: Settings, ids: PciIds, clock: Clock, ledger: Ledger, names: TypeNames) -> NodeView:
    """Return the view of a host with these facts and names of types, with the devices that an agent would offer."""
    state = NodeState(NodeTerms(settings, ids), ledger)
    state.observe_names(names)
    state.expect_no_account(KubeletAccount(clock.now(), clock.monotonic_s(), {}))
    state.observe_facts(facts)
    state.observe_request(NodeRequest(workload=Observed(None)))  # the settings alone: a command sees no label
    return state.decide(clock.monotonic_s(), clock.now())


def boot_id(kernel: Kernel) -> BootId | None:
    """Return the id of the host's current boot."""
    found = attributes.text(kernel, BOOT_ID)
    return BootId(found) if isinstance(found, str) else None
