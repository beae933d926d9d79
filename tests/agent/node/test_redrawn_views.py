"""A view that is drawn from the last view is the view that is drawn from scratch, whatever has changed."""

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.snapshot import DriverInformation, Facts, OpenDeviceUser, with_vgpu, with_vgpu_host
from gpuvirt.facts.vgpu import LiveVgpu, Scheduler, SchedulerPolicy
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.decisions import NodeDecisions
from gpuvirt.model.offers.offers import Health, OfferedDevice
from gpuvirt.model.offers.ondemand.offer import Carried, OnDemandGpu, OnDemandOffer
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.viewmaking import Drawn, ViewInputs, make_view
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu, SharedGpus
from gpuvirt.paths import HostPath
from gpuvirt_sim.clock import BEGINNING
from tests.agent.life.life import A10, AUDIO, RIGHT, RTX, T4
from tests.agent.node.pictures import A10_NAME, VGPUS, decided_at, observed

BUSY = Reason(ReasonCode.UNIT_BUSY, "a GPU", "is being changed")
UUID = "GPU-1"
QEMU = OpenDeviceUser(7, "qemu", HostPath("/dev/vfio/1"))


def inputs_of(decided: NodeDecisions) -> ViewInputs:
    view = decided.memory.parts.view
    assert view is not None
    return view.value.inputs


PICTURE = observed()
DECIDED = decided_at(PICTURE)
BEFORE = inputs_of(DECIDED)
VGPU, OTHER_VGPU = sorted(VgpuId(device) for device in BEFORE.offers.by_resource[VGPUS].devices)

Change = Callable[[ViewInputs], ViewInputs]


def on_host(change: Callable[[Facts], Facts]) -> Change:
    """Return what changes the facts of the host, of which unchanged objects stay."""

    def changed(inputs: ViewInputs) -> ViewInputs:
        return replace(inputs, inventory=inventory_of(change(inputs.inventory.facts).after(inputs.inventory.facts)))

    return changed


def inventory_of(facts: Facts) -> Inventory:
    return build_inventory(facts)


def function(gpu: PciAddress, **values: object) -> Change:
    return on_host(
        lambda facts: replace(
            facts,
            functions={**facts.functions, gpu: replace(facts.functions[gpu], **values)},
        )
    )


def with_users(**values: object) -> Change:
    return lambda inputs: replace(inputs, users=replace(inputs.users, **values))


def with_offers(**values: object) -> Change:
    return lambda inputs: replace(inputs, offers=replace(inputs.offers, **values))


def unhealthy(resource: ResourceName, device: str) -> Change:
    offer = BEFORE.offers.by_resource[resource]
    changed = OfferedDevice(offer.devices[DeviceId(device)].candidate, Health((BUSY,)))
    devices = {**offer.devices, changed.id: changed}
    return with_offers(by_resource={**BEFORE.offers.by_resource, resource: replace(offer, devices=devices)})


def without(resource: ResourceName) -> Change:
    return with_offers(
        by_resource={name: offer for name, offer in BEFORE.offers.by_resource.items() if name != resource}
    )


def shared(inputs: ViewInputs) -> ViewInputs:
    gpu = SharedGpu(RTX, GpuId(UUID), Units(1000))
    return replace(inputs, sharing=SharedOffer(SharedGpus((gpu,))))


def with_driver(inputs: ViewInputs) -> ViewInputs:
    """Return the inputs of a host whose driver shows the UUID of a GPU that pods have shares of."""
    facts = inputs.inventory.facts
    shown = replace(facts.device_ids, information={RTX: DriverInformation(UUID, None)})
    return replace(inputs, inventory=inventory_of(replace(facts, device_ids=shown)))


def with_share(inputs: ViewInputs) -> ViewInputs:
    return replace(inputs, pods_with_shares={GpuId(UUID): ("pod default/a",)})


def of_cdevs(inputs: ViewInputs) -> ViewInputs:
    """Return the inputs of a host whose VMs open a GPU by a node of its own."""
    platform = replace(inputs.inventory.facts.platform, iommufd=True)
    inputs = on_host(lambda facts: replace(facts, platform=platform, cdev_nodes=frozenset({"vfio0"})))(inputs)
    return function(A10, cdevs=("vfio0",))(inputs)


def created(facts: Facts) -> Facts:
    uuid = "6f9a4c1e-0000-4000-8000-000000000001"
    return with_vgpu(facts, T4, LiveVgpu(VgpuId(uuid), VgpuType("GRID T4-8Q"), T4, IommuGroup(99)))


def removed(facts: Facts) -> Facts:
    host = facts.vgpu_hosts[T4]
    return with_vgpu_host(facts, replace(host, live=host.live[1:]))


def on_vgpu_host(**values: object) -> Change:
    """Return what changes the vGPUs of a GPU, and nothing else of the facts."""
    return on_host(
        lambda facts: replace(
            facts,
            vgpu_hosts={**facts.vgpu_hosts, T4: replace(facts.vgpu_hosts[T4], **values)},
        )
    )


def lacking(lost: PciAddress) -> Change:
    return on_host(
        lambda facts: replace(facts, functions={key: found for key, found in facts.functions.items() if key != lost})
    )


def without_iommufd(facts: Facts) -> Facts:
    return replace(facts, platform=replace(facts.platform, iommufd=False))


def on_demand(inputs: ViewInputs) -> ViewInputs:
    return replace(inputs, on_demand=OnDemandOffer({T4: OnDemandGpu(Carried(Counter()), {}, BUSY)}))


CHANGES: dict[str, Change] = {
    "desired mode": lambda inputs: replace(inputs, desired_by_gpu={A10: "vgpu"}),
    "vGPU config": lambda inputs: replace(inputs, vgpu_configs={T4: "T4-8Q"}),
    "scheduler": lambda inputs: replace(inputs, schedulers={T4: Scheduler(SchedulerPolicy.EQUAL_SHARE)}),
    "on-demand vGPU": lambda inputs: replace(inputs, given={VGPU: ResourceName("nvidia.com/on-demand")}),
    "units": shared,
    "pod": with_users(pods={VGPU: ("pod default/a",)}),
    "VM": with_users(virtual_machines={A10: ("default/vm",)}),
    "allocation": with_users(by_resource={VGPUS: {DeviceId(OTHER_VGPU): "pod default/a"}}),
    "process": with_users(processes={BEFORE.inventory.gpus[A10].function.iommu_group: (QEMU,)}),
    "process with a vGPU": with_users(processes={BEFORE.inventory.vgpus[VGPU].live.group: (QEMU,)}),
    "withheld GPU": with_offers(withheld={**BEFORE.offers.withheld, T4: BUSY}),
    "withheld vGPU": lambda inputs: with_offers(withheld={VGPU: BUSY})(without(VGPUS)(inputs)),
    "health of a GPU": unhealthy(A10_NAME, A10),
    "health of a vGPU": unhealthy(VGPUS, VGPU),
    "resource": without(A10_NAME),
    "names": lambda inputs: replace(inputs, naming=replace(inputs.naming, ids=PciIds(()))),
    "NUMA node": function(A10, numa_node=7),
    "driver": function(RTX, driver="nvidia"),
    "created vGPU": on_host(created),
    "removed vGPU": on_host(removed),
    "group's node": on_host(lambda facts: replace(facts, group_nodes=frozenset())),
    "node of its own": of_cdevs,
    "function": lacking(RIGHT),
    "sibling": lacking(AUDIO),
    "types": on_vgpu_host(type_names={"nvidia-1": VgpuType("GRID T4-3Q")}),
    "vGPU without its node": on_vgpu_host(live=()),
    "GPU on demand": on_demand,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_drawn(name: str) -> None:
    now = CHANGES[name](BEFORE)
    last = Drawn(BEFORE, make_view(BEFORE, BEGINNING))
    drawn = make_view(now, BEGINNING, last)
    assert drawn == make_view(now, BEGINNING)
    assert (drawn.gpus, drawn.resources) != (last.view.gpus, last.view.resources), "the test changes nothing"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (of_cdevs, on_host(lambda facts: replace(facts, cdev_nodes=frozenset()))),
        (of_cdevs, function(A10, cdevs=())),
        (of_cdevs, on_host(without_iommufd)),
        (with_driver, with_share),
        (lambda inputs: with_share(with_driver(inputs)), lambda inputs: replace(inputs, pods_with_shares={})),
        (shared, lambda inputs: replace(inputs, sharing=SharedOffer())),
        (CHANGES["on-demand vGPU"], lambda inputs: replace(inputs, given={})),
        (CHANGES["created vGPU"], on_host(removed)),
    ],
    ids=["node gone", "node of another", "groups", "share", "share ended", "units gone", "given back", "another vGPU"],
)
def test_a_later_change_is_drawn(first: Change, then: Change) -> None:
    before = first(BEFORE)
    now, last = then(before), Drawn(before, make_view(before, BEGINNING))
    drawn = make_view(now, BEGINNING, last)
    assert drawn == make_view(now, BEGINNING)
    assert (drawn.gpus, drawn.resources) != (last.view.gpus, last.view.resources), "the test changes nothing"


def test_what_has_not_changed_is_the_object_of_the_last_view() -> None:
    last = Drawn(BEFORE, make_view(BEFORE, BEGINNING))
    drawn = make_view(CHANGES["NUMA node"](BEFORE), BEGINNING, last)
    changed = {str(view.address) for view, before in zip(drawn.gpus, last.view.gpus, strict=True) if view is not before}
    assert changed == {str(A10)}
    again = {str(device.id) for view in last.view.resources for device in view.devices}
    same_objects = {id(device) for view in last.view.resources for device in view.devices}
    redrawn = {str(device.id) for view in drawn.resources for device in view.devices if id(device) not in same_objects}
    assert redrawn == {str(A10)}
    assert again > redrawn
