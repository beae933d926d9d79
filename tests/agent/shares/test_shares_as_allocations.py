"""Shares are allocations of their GPUs: a GPU with shares stays on its driver, and units are no other devices."""

from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.records import ShareRecords, record_of, unit_id, with_gpus
from gpuvirt.model.shares.placement import GpuId

VGPU, OTHER = ResourceName("nvidia.com/vgpu"), ResourceName("nvidia.com/GA102GL_A10")
MAIN, UID = ContainerName("main"), PodUid("uid-1")


def started(name: str = "p") -> ShareRecords:
    demand = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(300)),))
    return ShareRecords().with_pod(UID, record_of("ns", name, demand, {MAIN: {GpuId("GPU-a"): Units(300)}}))


def test_the_units_of_a_started_pod_are_its_gpu() -> None:
    pod = Consumer(pod_uid=UID, container="main")
    listed = Consumer(namespace="ns", pod="p", container="main")
    whole = {(OTHER, DeviceId("0000:65:00.0")): pod}
    units = {(VGPU, unit_id(number)): (pod, listed)[number % 2] for number in range(300)}
    assert with_gpus({**whole, **units}, VGPU, started()) == {
        **whole,
        (VGPU, DeviceId("GPU-a::0")): Consumer(pod_uid=UID, namespace="ns", pod="p"),
    }


def test_a_gpu_counts_also_while_the_kubelet_lists_no_pod() -> None:
    assert list(with_gpus({}, VGPU, started())) == [(VGPU, "GPU-a::0")]


def test_the_units_of_a_pod_that_has_not_started_are_one_device_that_no_gpu_has() -> None:
    pod = Consumer(pod_uid=PodUid("uid-2"), container="main")
    units = {(VGPU, unit_id(number)): pod for number in range(300)}
    ((_, device),) = with_gpus(units, VGPU, ShareRecords())
    assert device in {unit_id(number) for number in range(300)}


def test_a_pod_that_is_created_again_under_its_name_has_not_started() -> None:
    again = Consumer(pod_uid=PodUid("uid-2"), namespace="ns", pod="p", container="main")
    found = with_gpus({(VGPU, unit_id(0)): again}, VGPU, started())
    assert found[VGPU, unit_id(0)] == again
    assert (VGPU, DeviceId("GPU-a::0")) in found
