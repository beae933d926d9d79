"""Pictures of a node, by what has happened to its host and what its GpuNode desires, and their decisions."""

import errno
from collections.abc import Callable, Mapping
from functools import cache

from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.allocateddevices import known_devices
from gpuvirt.model.allocation.ledger import Consumer, KubeletAccount, Ledger
from gpuvirt.model.allocation.nodeledger import node_ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.node.decisions import NodeDecisions, decide
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.offers.notice import NoticeTimes
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import A10, HOST, RTX
from tests.agent.node.simnode import IDS

NOTHING, NONE = NodeMemory(), dict[str, str]()
TERMS = NodeTerms(Settings(), IDS, request=RequestTerms(in_cluster=True, follows_spec=True))
NOTICE = replace(TERMS, notice=NoticeTimes(notice_s=0.5, notice_most_s=3.0, growth_s=15.0))
A10_NAME, T4_NAME = ResourceName("nvidia.com/GA102GL_A10"), ResourceName("nvidia.com/TU104GL_TESLA_T4")
VGPUS = ResourceName("nvidia.com/GRID_T4-8Q")


def as_built(_: SimKernel) -> None: ...


def a10_unplugged(kernel: SimKernel) -> None:
    kernel.unplug(A10)


def _a10_unread(kernel: SimKernel) -> None:
    kernel.faults.fail(HostPath(f"/sys/bus/pci/devices/{A10}/vendor"), errno.EIO)


def _a10_off_the_bus(kernel: SimKernel) -> None:
    kernel.fall_off_bus(A10, fallen=True)


def _rtx_on_its_native_driver(kernel: SimKernel) -> None:
    kernel.rebind(RTX, "nvidia")


def _vm_by_hand(kernel: SimKernel) -> None:
    kernel.start_vm(IommuGroup(30), "qemu-by-hand")


def a_vgpu_removed(kernel: SimKernel) -> None:
    kernel.write(HostPath(f"/sys/bus/mdev/devices/{min(kernel.mdev.devices)}/remove"), b"1")


def _node_of_the_a10_deleted(kernel: SimKernel) -> None:
    kernel.delete_node(IommuGroup(30))


HOSTS: tuple[Callable[[SimKernel], None], ...] = (
    as_built,
    a10_unplugged,
    _a10_unread,
    _a10_off_the_bus,
    _rtx_on_its_native_driver,
    _vm_by_hand,
    a_vgpu_removed,
    _node_of_the_a10_deleted,
)


@cache
def facts_of(happens: Callable[[SimKernel], None]) -> Facts:
    """Return the facts of the host after something has happened to it."""
    kernel = build_host(HOST)
    before = scan(kernel)
    happens(kernel)
    return with_users(kernel, scan(kernel, before))


def with_host(picture: NodePicture, facts: Facts) -> NodePicture:
    """Return the picture after an observation of the host, as an agent takes it."""
    facts = facts.after(picture.inventory.facts) if picture.inventory is not None else facts
    named = picture.ledger.with_type_names(facts)
    inventory = build_inventory(facts, named.type_names)
    ledger = named.with_known(known_devices(inventory), facts.platform.boot_id)
    return replace(picture, inventory=inventory, ledger=ledger)


def account(picture: NodePicture, at_s: float) -> KubeletAccount:
    """Return an account of the kubelet with all allocations of a picture."""
    held = {
        (entry.resource, entry.device): entry.consumer or Consumer(namespace="default", pod=f"pod-{number}")
        for number, entry in enumerate(picture.ledger.entries)
    }
    return KubeletAccount(BEGINNING, at_s, held)


def with_answer(picture: NodePicture, at_s: float) -> NodePicture:
    return replace(picture, ledger=picture.ledger.with_account(account(picture, at_s)))


def observed(happens: Callable[[SimKernel], None] = as_built) -> NodePicture:
    """Return the picture of a node whose kubelet has answered."""
    return with_answer(with_host(NodePicture(ledger=node_ledger(Ledger())), facts_of(happens)), 0.0)


def desiring(
    picture: NodePicture,
    mode: DesiredMode,
    vgpu_config: str | None = None,
    *,
    gpus: Mapping[str, str] = NONE,
    withheld: tuple[Withheld, ...] = (),
    reviewed: tuple[str, ...] | None = None,
) -> NodePicture:
    """Return the picture with a GpuNode that desires this mode, and a cluster without vGPU configs."""
    spec = GpuNodeSpec(str(mode), gpus, vgpu_config, withheld, reviewed=reviewed)
    return replace(picture, request=NodeRequest(configs=Observed(None), spec=Observed(spec)))


def decided_at(
    picture: NodePicture, now_s: float = 0.0, memory: NodeMemory = NOTHING, terms: NodeTerms = TERMS
) -> NodeDecisions:
    return decide(picture, memory, terms, now_s, BEGINNING)
