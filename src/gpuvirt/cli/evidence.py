"""Gathers the evidence of a host from all layers, for `gpuvirt doctor` and `gpuvirt why`."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpuvirt.agent import published
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.kubelet.survey import read_kubelet
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.clock import Clock
from gpuvirt.diagnosis import diagnosis
from gpuvirt.diagnosis.evidence import ClusterNode, Evidence
from gpuvirt.diagnosis.findings import Report
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.deviceids import read_device_ids
from gpuvirt.hardware.host.platform import read_setup
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.allocation.pluginanswers import gpus_by_uuid, is_nvidias_id
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.inventory.naming import Learn, observed_names
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.paths import KubeletPaths


class EvidenceSources(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of evidence besides the kernel."""

    kubelet: KubeletPaths
    settings: Settings
    ids: PciIds
    clock: Clock
    ledger: Ledger = snapshot.EMPTY
    state_file: Path | None = None
    """The path of a running agent's state file."""
    procs: Iterable[Path] = ()
    """The `/proc` folders in which a running agent is visible."""
    account: AllocationReader | None = None
    """Reads the allocations on a host without an agent; None: they are taken from the ledger alone."""
    learn: Learn = observed_names
    """Returns the names of the host's vGPU types."""
    kubevirts: tuple[KubeVirt, ...] | None = None
    cluster_nodes: tuple[ClusterNode, ...] | None = None


def gather(kernel: Kernel, around: EvidenceSources) -> Evidence:
    """Return all evidence of a host, without changing the host."""
    facts = with_users(kernel, scan(kernel))
    names = around.learn(facts, around.ledger.names)
    inventory = build_inventory(facts, names)
    view, allocations = None, PodAllocations()
    if around.state_file is not None:
        boot_id = facts.platform.boot_id
        view = published.read_view(around.state_file, around.clock.monotonic_s(), boot_id, around.procs)
    if view is None:
        view = snapshot.view_of(facts, around.settings, around.ids, around.clock, around.ledger, names)
        allocations = around.account.account(inventory).allocations if around.account is not None else allocations
    return Evidence(
        setup=read_setup(kernel, facts, (gpu.function for gpu in inventory.gpus.values())),
        inventory=inventory,
        view=view,
        settings=around.settings,
        kubelet=read_kubelet(around.kubelet),
        allocations=allocations,
        agent_has_run=bool(around.ledger.resources),
        kubevirts=around.kubevirts,
        cluster_nodes=around.cluster_nodes,
    )


def address_of(kernel: Kernel, uuid: str) -> PciAddress | None:
    """Return the GPU that NVIDIA's driver calls `GPU-...`; None for another text, and where no GPU has the UUID.

    It reads the driver's files in /proc, which no check of a host does: such a read waits for a driver that hangs.
    """
    if not is_nvidias_id(uuid):
        return None
    found = gpus_by_uuid(read_device_ids(kernel, scan(kernel).functions.values()), uuid) or frozenset()
    return next(iter(found)) if len(found) == 1 else None


def diagnose(kernel: Kernel, around: EvidenceSources) -> Report:
    """Return the findings of all checks on a host."""
    return diagnosis.report(gather(kernel, around))
