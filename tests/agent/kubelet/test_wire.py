"""The kubelet's messages: arbitrary requests are read completely or refused; answers have the expected form."""

from collections.abc import Callable, Sequence

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.kubelet import wire
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.nodes import unread_node
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.offers.view import DeviceView, ResourceView
from gpuvirt.paths import HostPath

IDS = st.lists(st.lists(st.text(max_size=20), max_size=4), max_size=3)


def device(name: str, *, healthy: bool, numa_node: int | None) -> DeviceView:
    return DeviceView(DeviceId(name), healthy, numa_node, IommuGroup(1), PciAddress("0000:65:00.0"))


@given(IDS)
def test_encoded_requests_are_read_back(containers: Sequence[Sequence[str]]) -> None:
    request = pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=list(ids)) for ids in containers]
    )
    assert wire.asked_for(pb.AllocateRequest.FromString(request.SerializeToString())) == [
        list(ids) for ids in containers
    ]


REQUEST = pb.AllocateRequest(
    container_requests=[pb.ContainerAllocateRequest(devices_ids=["a", "bc"]), pb.ContainerAllocateRequest()]
).SerializeToString()


def damaged(at: int, junk: bytes) -> bytes:
    return REQUEST[:at] + junk + REQUEST[at + len(junk) :]


@given(
    st.binary(max_size=100) | st.builds(damaged, st.integers(0, len(REQUEST)), st.binary(max_size=3)),
)
def test_arbitrary_bytes_are_a_request_or_refused(content: bytes) -> None:
    try:
        wire.asked_for(pb.AllocateRequest.FromString(content))
        wire.choices(pb.PreferredAllocationRequest.FromString(content))
    except DecodeError:
        return


def test_a_device_list_has_only_known_numa_nodes() -> None:
    view = ResourceView(
        ResourceName("nvidia.com/x"),
        (device("a", healthy=True, numa_node=1), device("b", healthy=False, numa_node=None)),
    )
    a, b = wire.device_list(view, unknown_numa_is_node_0=False).devices
    assert (a.ID, a.health, [node.ID for node in a.topology.nodes]) == ("a", "Healthy", [1])
    assert (b.ID, b.health, b.HasField("topology")) == ("b", "Unhealthy", False)
    _, b = wire.device_list(view, unknown_numa_is_node_0=True).devices
    assert [node.ID for node in b.topology.nodes] == [0]


def test_the_healthy_devices_of_a_list() -> None:
    listed = pb.ListAndWatchResponse(devices=[pb.Device(ID="a", health="Healthy"), pb.Device(ID="b", health="x")])
    assert wire.healthy_ids(listed.SerializeToString()) == {"a"}


@pytest.mark.parametrize("parse", [wire.healthy_ids, wire.cdi_devices])
def test_a_damaged_message_is_refused(parse: Callable[[bytes], object]) -> None:
    with pytest.raises(DamagedError, match="cannot be parsed"):
        parse(b"\xff\xff")


def test_an_answers_files_and_annotations_of_other_kinds_name_no_device() -> None:
    content = pb.ContainerAllocateResponse(
        mounts=[pb.Mount(host_path="/etc/x"), pb.Mount(host_path="/dev/x")],
        annotations={"example.com/x": "nvidia.com/gpu=0", "cdi.k8s.io/x": "nvidia.com/gpu=1"},
    )
    found = wire.plugin_answer(content.SerializeToString(), unread_node)
    assert ([node.path for node in found.nodes], found.cdi_devices) == (["/dev/x"], ("nvidia.com/gpu=1",))


def test_an_answer_has_the_same_path_on_the_host_and_in_the_container() -> None:
    answer = wire.allocate_response([Attachment({"A": "b"}, (HostPath("/dev/vfio/12"),)), Attachment({}, ())])
    with_device, without_devices = answer.container_responses
    assert dict(with_device.envs) == {"A": "b"}
    assert [(spec.host_path, spec.container_path, spec.permissions) for spec in with_device.devices] == [
        ("/dev/vfio/12", "/dev/vfio/12", "mrw")
    ]
    assert without_devices == pb.ContainerAllocateResponse()


def test_the_registration_request_has_the_endpoint_and_options() -> None:
    request = wire.registration(ResourceName("nvidia.com/x"), "kubevirt-x.sock")
    assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "kubevirt-x.sock", "nvidia.com/x")
    assert request.options.get_preferred_allocation_available
    assert request.options.pre_start_required
