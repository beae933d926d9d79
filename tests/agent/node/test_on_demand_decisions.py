"""Decisions of a node in mode `on-demand` that take over parts of the last ones: they are those decided from scratch.

From scratch: by a copy of the picture, no object of which is that of an earlier picture, and by a memory that never
had parts. A part that is outdated could remove a vGPU that a pod has.
"""

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, GpuModes, LiveVgpu, SmiReport
from gpuvirt.hardware.programs.smireport import read_report
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.hardware.vgpu import mdev, vendor_vfio
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.allocation.ledger import Consumer, Entry, KubeletAccount, Ledger, Stage, record
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.allocation.tenancy import TenantKind
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.steps import RemoveVgpu
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import IdleCount, OnDemandSettings, Settings, Spread
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.node.decisions import NodeDecisions, decide
from gpuvirt.model.node.parts import Parts
from gpuvirt.model.node.picture import NodePicture
from gpuvirt.model.offers.ondemand.offer import PodEnds, VgpuPlace, choose
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import Process
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.node.pictures import NOTICE, TERMS
from tests.thoroughness import examples

P100, T4, L40S, A30 = (PciAddress(f"0000:{bus}:00.0") for bus in ("3b", "65", "98", "b1"))
T4_8Q = VgpuType("GRID T4-8Q")
HOST = HostSpec(
    about="two GPUs with mediated devices, one with VFs that carry vGPUs, one with GPU instances",
    slots=(
        SlotSpec(at=P100, board="P100", group=31, numa=0),
        SlotSpec(at=T4, board="T4", group=32, numa=1, vgpus={T4_8Q: 1}),
        SlotSpec(at=L40S, board="L40S", group=33, numa=1, vfs=3),
        SlotSpec(at=A30, board="A30", group=34, numa=1, vfs=3, mig={"1g.6gb": 2, "2g.12gb": 1}),
    ),
)
DEFAULTS = Settings(mode=DesiredMode.ON_DEMAND)
MIXED = OnDemandSettings(idle_count=IdleCount.MAX, sizes=Sizes.MIXED)
ALL_TERMS = (
    replace(TERMS, settings=DEFAULTS, run_id="0000abcd"),
    replace(NOTICE, settings=Settings(mode=DesiredMode.ON_DEMAND, require_reset=True), run_id="0000abcd"),
    replace(TERMS, settings=Settings(mode=DesiredMode.ON_DEMAND, on_demand=MIXED), run_id="0000abcd"),
)
GPUS = st.sampled_from([P100, T4, L40S, A30])
SOME_GPUS = st.frozensets(GPUS, max_size=2)


def details(decided: NodeDecisions) -> tuple[object, ...]:
    """Return what does not count in comparisons of decisions: the order of types, and the types of devices."""
    offer, offers = decided.memory.on_demand, decided.memory.offers
    given = [(entry, entry.target.type) for found in offer.given.values() for entry in found.values()]
    listed = [(device.id, device.candidate.target.type) for _, device in offers.devices()]
    states = {gpu: state and state.known_types for gpu, state in decided.desired.vgpus.on_demand.items()}
    return list(offer.types.items()), list(offer.current.items()), given, listed, states


@dataclass(frozen=True)
class UnderWay:
    """A change of this process that is under way."""

    scope: Scope


class OnDemandPictures(RuleBasedStateMachine):
    """A node with vGPUs on demand, whose picture changes piece by piece, and is decided after each piece."""

    @initialize(terms=st.sampled_from(ALL_TERMS))
    def begin(self, terms: object) -> None:
        self.kernel = build_host(HOST)
        self.terms = next(found for found in ALL_TERMS if found is terms)
        self.state = NodeState(self.terms, Ledger())
        self.from_scratch = self.state.memory
        self.now_s, self.number = 0.0, 0
        self.vms: list[Process] = []
        self.ended: frozenset[DeviceId] = frozenset()
        self.decide()
        self.scanned: tuple[Facts, float] = self.scan(), self.now_s
        self.state.observe_facts(self.scanned[0])
        self.state.observe_account(KubeletAccount(BEGINNING, 0.0, {}))
        self.modes_are_desired({})

    def decide(self) -> None:
        self.now_s += 0.1
        state, ledger = self.state, self.state.ledger
        memory = dataclasses.replace(self.from_scratch, smi=state.memory.smi, parts=Parts())
        state.decide(self.now_s, BEGINNING)
        picture: NodePicture = pickle.loads(pickle.dumps(replace(state.picture, ledger=ledger)))  # noqa: S301  our own
        decided = decide(picture, memory, self.terms, self.now_s, BEGINNING)
        assert state.decisions == decided
        assert details(state.decisions) == details(decided)
        self.from_scratch = decided.memory

    def scan(self) -> Facts:
        inventory = self.state.inventory
        return with_users(self.kernel, scan(self.kernel, inventory.facts if inventory is not None else None))

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry in self.state.ledger.entries if isinstance(entry.stage, Stage)]

    def change(self, entry: Entry) -> None:
        self.state.record_allocation(record(self.state.ledger.entries, [entry]))
        self.decide()

    @property
    def live(self) -> list[tuple[PciAddress, LiveVgpu]]:
        """The vGPUs of the host, as it is now."""
        return [(gpu, live) for gpu, host in scan(self.kernel).vgpu_hosts.items() for live in host.live]

    # --- pods

    @rule(data=st.data(), is_made=st.sampled_from([True, True, True, False]))
    def a_pod_is_admitted(self, data: st.DataObject, is_made: bool) -> None:
        offer, inventory = self.state.memory.on_demand, self.state.inventory
        free = [(resource, device) for resource, ids in sorted(offer.free.items()) for device in ids]
        if inventory is None or not free:
            return
        resource, device = data.draw(st.sampled_from(free))
        vgpu_type = offer.type_of(resource)
        assert vgpu_type is not None
        place = choose(inventory, self.state.on_demand_now(), vgpu_type, Spread.PACK)
        if place is not None:
            entry = self.intended(resource, device, place, vgpu_type)
            self.change(entry)
            if is_made:
                self.create(entry, place)

    def intended(self, resource: ResourceName, device: DeviceId, place: VgpuPlace, vgpu_type: VgpuType) -> Entry:
        self.number += 1
        is_mdev = place.host.framework is Framework.MDEV
        vgpu = VgpuId(f"00000000-0000-4000-8000-{self.number:012d}" if is_mdev else place.parent.address)
        target, allocation = Target(place.gpu, vgpu, vgpu_type), f"allocate:x:{self.number}"
        return Entry(
            resource, device, target, None, allocation, BEGINNING, allocated_s=self.now_s, stage=Stage.INTENDED
        )

    def create(self, entry: Entry, place: VgpuPlace) -> None:
        vgpu, vgpu_type, parent = entry.target.vgpu, entry.target.type, place.parent
        assert vgpu is not None
        assert vgpu_type is not None
        try:
            backend_of(place.host.framework).create(self.kernel, parent.address, vgpu_type, vgpu)
        except OSError:
            return  # a vGPU by hand has taken the room, and no scan has seen it yet
        if place.host.framework is Framework.MDEV:
            live = mdev.read_new(self.kernel, vgpu, parent.address)
        else:
            live = vendor_vfio.read_new(self.kernel, parent, place.host)
        assert live is not None
        self.state.observe_created(place.gpu, live, self.now_s)
        self.decide()
        group = live.group if isinstance(live.group, int) else None
        self.change(replace(entry, group=group, stage=Stage.CREATED))

    @rule(data=st.data())
    @precondition(lambda self: any(entry.stage is Stage.CREATED for entry in self.entries))
    def a_container_starts(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([entry for entry in self.entries if entry.stage is Stage.CREATED]))
        consumer = Consumer(namespace="default", pod=entry.device, pod_uid=PodUid(f"uid-{entry.device}"))
        self.change(replace(entry, consumer=consumer, stage=Stage.STARTED))

    @rule(data=st.data())
    @precondition(lambda self: self.state.ledger.entries)
    def a_pod_ends(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.state.ledger.entries))
        self.ended |= {entry.device}
        for _ in range(3):
            self.now_s += 60.0
            self.the_kubelet_answers(has_uids=True)

    @rule(has_uids=st.booleans())
    def the_kubelet_answers(self, has_uids: bool) -> None:
        consumers: Mapping[tuple[ResourceName, DeviceId], Consumer] = {
            (entry.resource, entry.device): Consumer(
                namespace="default",
                pod=entry.device,
                pod_uid=PodUid(f"uid-{entry.device}") if has_uids else None,
                answer=PluginAnswer(env=(("MDEV_PCI_RESOURCE_A", str(entry.target.id)),)),
            )
            for entry in self.state.ledger.entries
            if entry.device not in self.ended
        }
        self.state.observe_account(KubeletAccount(BEGINNING, self.now_s, consumers))
        self.decide()

    @rule(data=st.data())
    def pods_are_ending(self, data: st.DataObject) -> None:
        pods = sorted(self.state.on_demand_pods)
        ends = st.frozensets(st.sampled_from(pods)) if pods else st.just(frozenset[PodUid]())
        ended = data.draw(ends)
        self.state.observe_pod_ends(PodEnds(ended, data.draw(ends) - ended))
        self.decide()

    @rule(data=st.data())
    @precondition(lambda self: self.state.ledger.entries)
    def the_type_of_a_pods_vgpu_gets_known(self, data: st.DataObject) -> None:
        """Entries are equal whatever their types, and plans differ."""
        entry = data.draw(st.sampled_from(self.state.ledger.entries))
        named = (entry.target.type, *self.state.memory.on_demand.types.values(), None)
        target = dataclasses.replace(entry.target, type=data.draw(st.sampled_from(named)))
        self.change(replace(entry, target=target))

    @rule(data=st.data())
    def a_device_is_given_by_its_own_id(self, data: st.DataObject) -> None:
        """A pod of before the mode: its vGPU stays listed by its own id."""
        held = {entry.device for entry in self.state.ledger.entries}
        offers = self.state.memory.offers
        free = [(name, found) for name, found in offers.devices() if found.health.healthy and found.id not in held]
        if free:
            name, device = data.draw(st.sampled_from(free))
            group, target = device.candidate.group, device.candidate.target
            self.change(Entry(name, device.id, target, group, f"own:{device.id}", BEGINNING, allocated_s=self.now_s))

    # --- the host

    @rule()
    def a_scan_begins(self) -> None:
        self.scanned = self.scan(), self.now_s

    @rule()
    def the_scan_ends(self) -> None:
        """It may lack vGPUs that were created since it has begun, and have removed ones."""
        self.state.observe_facts(*self.scanned)
        self.decide()

    def the_host_is_observed(self) -> None:
        self.now_s += 0.1
        self.a_scan_begins()
        self.the_scan_ends()

    def removable(self) -> Iterator[RemoveVgpu]:
        """Yield the vGPUs that a plan removes now."""
        vgpus = self.state.decisions.desired.vgpus
        return (step for gpu in vgpus.by_gpu for step in vgpus.plan_of(gpu).steps if isinstance(step, RemoveVgpu))

    @rule(data=st.data(), is_seen=st.booleans())
    @precondition(lambda self: any(self.removable()))
    def a_planned_removal_ends(self, data: st.DataObject, is_seen: bool) -> None:
        step = data.draw(st.sampled_from(list(self.removable())))
        self.remove(step.vgpu, is_seen=is_seen)

    def remove(self, vgpu: VgpuId, *, is_seen: bool) -> None:
        gpu, live = next(((gpu, live) for gpu, live in self.live if live.id == vgpu), (None, None))
        if gpu is None or live is None:
            return  # removed before, and no scan has seen it yet
        if isinstance(live.group, int) and self.kernel.vfio.in_use(live.group, vgpu):
            return  # as no proof of the removal would be found
        by_address = HostPath(f"/sys/bus/pci/devices/{vgpu}/nvidia/current_vgpu_type")
        path, text = (by_address, b"0") if gpu == L40S else (HostPath(f"/sys/bus/mdev/devices/{vgpu}/remove"), b"1")
        self.kernel.write(path, text)
        if is_seen:
            self.state.observe_vgpus([scan(self.kernel).vgpu_hosts[gpu]], self.now_s)
        self.decide()

    @rule(data=st.data())
    @precondition(lambda self: self.entries)
    def a_reboot_has_removed_a_pods_vgpu(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        while self.vms:
            self.a_vm_ends()
        self.remove(VgpuId(entry.target.id), is_seen=True)
        self.change(replace(entry, group=None, earlier_boot=True))

    @rule(gpu=st.sampled_from([P100, T4]))
    def a_vgpu_is_created_by_hand(self, gpu: PciAddress) -> None:
        host = scan(self.kernel).vgpu_hosts[gpu]
        types = [vgpu_type for vgpu_type, left in sorted(host.creatable.get(gpu, {}).items()) if left]
        if types:
            self.number += 1
            vgpu = VgpuId(f"00000000-0000-4000-9000-{self.number:012d}")
            backend_of(Framework.MDEV).create(self.kernel, gpu, types[-1], vgpu)
        self.the_host_is_observed()

    @rule(data=st.data())
    def a_vm_starts(self, data: st.DataObject) -> None:
        free = {(live.group, live.id) for _, live in self.live if isinstance(live.group, int)}
        groups = sorted(group for group, vgpu in free if not self.kernel.vfio.in_use(group, vgpu))
        if groups and len(self.vms) < 2:
            self.vms.append(self.kernel.start_vm(data.draw(st.sampled_from(groups))))
        self.the_host_is_observed()

    @rule()
    @precondition(lambda self: self.vms)
    def a_vm_ends(self) -> None:
        self.kernel.end_vm(self.vms.pop())
        self.the_host_is_observed()

    @rule(gpu=GPUS, is_fallen=st.booleans())
    def a_gpu_falls_off_the_bus(self, gpu: PciAddress, is_fallen: bool) -> None:
        self.kernel.fall_off_bus(gpu, fallen=is_fallen)
        self.the_host_is_observed()

    # --- all others

    @rule(drained=SOME_GPUS, changing=SOME_GPUS, blocked=SOME_GPUS)
    def gates_change(
        self, drained: frozenset[PciAddress], changing: frozenset[PciAddress], blocked: frozenset[PciAddress]
    ) -> None:
        self.state.observe_gates(Scope(drained), dict.fromkeys(blocked, "create"))
        self.state.changes.under_way[:] = [UnderWay(Scope(changing))]  # type: ignore[list-item]  # its scope alone
        self.decide()

    @rule(
        modes=st.dictionaries(GPUS, st.sampled_from(["on-demand", "vgpu", "passthrough", "container", "unmanaged"])),
        config=st.sampled_from(["T4-8Q", "P100-8Q"]),
    )
    def modes_are_desired(self, modes: Mapping[str, str], config: str = "T4-8Q") -> None:
        spec = GpuNodeSpec("on-demand", dict(modes), config)
        self.state.observe_request(NodeRequest(configs=Observed(None), spec=Observed(spec)))
        self.decide()

    @rule(mixes=st.booleans())
    def nvidia_smi_answers(self, mixes: bool) -> None:
        for gpu, (desired, _) in self.state.decisions.desired.vgpus.questions.items():
            report = SmiReport(GpuModes(gpu, mixed_sizes=mixes, can_mix_sizes=True))
            if gpu == A30:
                report = read_report(SimTools(self.kernel), gpu, types=False, scheduler=False)
            self.state.observe_smi(gpu, desired, report, self.now_s)
        self.decide()

    @rule(gpu=GPUS)
    def a_report_is_outdated(self, gpu: PciAddress) -> None:
        self.state.forget_smi(gpu)
        self.decide()

    @rule(gpu=GPUS, kind=st.sampled_from(list(TenantKind)))
    def a_gpu_gets_a_tenant(self, gpu: PciAddress, kind: TenantKind) -> None:
        self.state.tenancies.give({gpu: kind}, on_disk=False)
        self.decide()

    @rule(seconds=st.floats(0.1, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.decide()
        self.now_s += seconds
        self.decide()

    @invariant()
    @precondition(lambda self: hasattr(self, "vms"))
    def no_plan_removes_a_vgpu_that_a_pod_has(self) -> None:
        had = {entry.target.vgpu for entry in self.state.ledger.entries}
        assert not had & {step.vgpu for step in self.removable()}

    @invariant()
    @precondition(lambda self: hasattr(self, "vms"))
    def an_unchanged_picture_is_decided_as_before(self) -> None:
        self.decide()


TestOnDemandPictures = OnDemandPictures.TestCase
TestOnDemandPictures.settings = settings(
    max_examples=examples(25), stateful_step_count=40, deadline=None, derandomize=True
)
# In a worker with a large heap it takes minutes, alone some ten seconds.
TestOnDemandPictures.pytestmark = [pytest.mark.timeout(600)]  # type: ignore[attr-defined]  # pytest reads it
