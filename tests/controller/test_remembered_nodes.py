"""Decisions with a memory: equal to those from scratch after any changes, and made only for the nodes that changed."""

import asyncio
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.clock import Signal
from gpuvirt.controller.decisions import basis_of, decide, slices
from gpuvirt.controller.deployment import Existing
from gpuvirt.controller.kubevirt.decisions import KubeVirtObserved
from gpuvirt.controller.nodememory import DecidedNodes
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.controller.picture import Picture, read_of
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.store import Store
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import Condition, Node, NodeInfo, NodeStatus, OwnedMetadata, Pod, PodSpec, ReadNode
from gpuvirt.kube.kinds.gpunode import Gpu, Spec, Status
from gpuvirt.kube.kinds.kubevirt import KubeVirt
from gpuvirt.kube.objects import PARTS as PARTS_OF_A_MAP
from gpuvirt.kube.objects import ObjectKey, ObjectMap, key_of
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt_sim.clock import SimClock
from tests.controller.observedcluster import AT, NFD, SETTINGS, ObservedCluster, node, policy

T = TypeVar("T", bound=KubernetesObject)

NAMES = ("node01", "node02", "node03")


def beating(item: Node, beat: int) -> Node:
    """Return a node after a heartbeat of its kubelet."""
    metadata = msgspec.structs.replace(item.metadata, resource_version=str(beat))
    status = msgspec.structs.replace(item.status, conditions=(Condition("Ready", message=f"beat {beat}"),))
    return msgspec.structs.replace(item, metadata=metadata, status=status)


NODES_OF = {
    name: st.builds(
        lambda workload, labels, annotations, status, beat, name=name: beating(
            Node(
                Metadata(
                    name=name,
                    labels=labels | ({"nvidia.com/gpu.workload.config": workload} if workload else {}),
                    annotations=annotations,
                ),
                status=status,
            ),
            beat,
        ),
        st.sampled_from(["", "vm-vgpu", "vm-passthrough", "container", "shared", "on-demand", "wrong"]),
        st.sampled_from(
            [
                {},
                NFD,
                {**NFD, "gpuvirt.io/node": "true", "nvidia.com/gpu.deploy.vgpu-manager": "true"},
                {**NFD, "nvidia.com/gpu.deploy.operands": "false"},
                {**NFD, "nvidia.com/gpu.deploy.sandbox-device-plugin": "paused-for-vgpu-change"},
            ]
        ),
        st.sampled_from([{}, {"gpuvirt.io/operands-off": "true"}]),
        st.builds(
            NodeStatus,
            allocatable=st.sampled_from([{}, {"nvidia.com/gpu": "1"}, {"nvidia.com/gpu": "0"}]),
            capacity=st.sampled_from([{}, {"nvidia.com/gpu": "1"}, {"nvidia.com/A10": "2"}]),
            node_info=st.sampled_from([NodeInfo(), NodeInfo("cri-o://1.33")]),
        ),
        st.integers(1, 5),
    )
    for name in NAMES
}
REPORTS = st.one_of(
    st.none(),
    st.builds(
        Status,
        gpus=st.sampled_from(
            [
                (),
                (Gpu(address="0000:65:00.0", mode="vgpu", vfs=4),),
                (Gpu(address="0000:65:00.0", mode="passthrough", users=("a/b",)),),
            ]
        ),
        observed_generation=st.integers(0, 2),
    ),
)
APPS = ("gpuvirt-node", "nvidia-vgpu-device-manager", "nvidia-driver-daemonset")


KUBEVIRT = KubeVirt(metadata=OwnedMetadata(name="kubevirt", namespace="kubevirt", uid="kubevirt"))
PARTS = 2
"""So few parts of the nodes that several nodes share one."""


@dataclass
class Changing:
    """A cluster that events change. As in the controller, what an event does not change stays the same object."""

    nodes: ObjectMap[ReadNode] = field(default_factory=lambda: ObjectMap.of({}, PARTS))
    gpu_nodes: ObjectMap[OwnedGpuNode] = field(default_factory=lambda: ObjectMap.of({}, PARTS))
    pods: ObjectMap[Pod] = field(default_factory=lambda: ObjectMap.of({}, PARTS))
    vgpus: bool = True
    vms: bool = True

    def change(self, data: st.DataObject) -> None:
        """Make one event happen."""
        name = data.draw(st.sampled_from(NAMES))
        match data.draw(st.sampled_from(["node", "no node", "gpu node", "no gpu node", "pod", "no pod", "policy"])):
            case "node":
                self.nodes = self.nodes.with_object(ObjectKey("", name), data.draw(NODES_OF[name]))
            case "no node":
                self.nodes = self.nodes.without(ObjectKey("", name))
            case "gpu node":
                spec = Spec(mode=data.draw(st.sampled_from(DesiredMode)))
                metadata = ManagedMetadata(name=name, generation=1)
                gpu_node = OwnedGpuNode(metadata=metadata, spec=spec, status=data.draw(REPORTS))
                self.gpu_nodes = self.gpu_nodes.with_object(key_of(gpu_node), gpu_node)
            case "no gpu node":
                self.gpu_nodes = self.gpu_nodes.without(ObjectKey("", name))
            case "pod":
                app = data.draw(st.sampled_from(APPS))
                pod = Pod(Metadata(name=f"{app}-{name}", namespace="gpu-operator", labels={"app": app}), PodSpec(name))
                self.pods = self.pods.with_object(key_of(pod), pod)
            case "no pod" if self.pods:
                self.pods = self.pods.without(data.draw(st.sampled_from(sorted(self.pods))))
            case _:
                self.vgpus, self.vms = data.draw(st.booleans()), data.draw(st.booleans())

    @property
    def picture(self) -> Picture:
        """The objects of the cluster."""
        fields = {"sandboxWorkloads": {"enabled": self.vms}, "vgpuDeviceManager": {"enabled": self.vgpus}}
        observed_cluster = ObservedCluster(
            (), (policy(fields),), kubevirt=KubeVirtObserved(kubevirts={key_of(KUBEVIRT): KUBEVIRT})
        )
        return replace(
            observed_cluster.picture, nodes=self.nodes, gpu_nodes=self.gpu_nodes, existing=Existing(pods=self.pods)
        )

    @property
    def listed_again(self) -> Picture:
        """The same objects, listed again in another order: none is the same object."""

        def again(objects: ObjectMap[T]) -> ObjectMap[T]:
            return ObjectMap.of({key: deepcopy(objects[key]) for key in sorted(objects, reverse=True)}, PARTS)

        existing = Existing(pods=again(self.pods))
        return replace(self.picture, nodes=again(self.nodes), gpu_nodes=again(self.gpu_nodes), existing=existing)


@given(st.data(), st.booleans(), st.booleans())
def test_decisions_with_a_memory_equal_those_from_scratch(data: st.DataObject, coexists: bool, deploys: bool) -> None:
    settings = ControllerSettings("gpu-operator", coexists=coexists, image="gpuvirt:1" if deploys else None)
    cluster, memory = Changing(), DecidedNodes(slice_nodes=1)
    for _ in range(data.draw(st.integers(1, 12))):
        cluster.change(data)
        picture = cluster.listed_again if data.draw(st.sampled_from([False] * 5 + [True])) else cluster.picture
        basis = basis_of(picture, settings, AT, memory)
        for _ in islice(slices(basis, picture, memory), data.draw(st.integers(0, 3))):
            cluster.change(data)  # a slice of an older picture is no harm
        memory.forget(data.draw(st.integers(0, 9)))
        picture = cluster.picture
        assert decide(picture, settings, (), AT, memory) == decide(cluster.listed_again, settings, (), AT)


def test_a_slice_decides_some_nodes_and_the_decision_those_that_are_left() -> None:
    picture, memory = (
        ObservedCluster([node(name=f"node{number:02}") for number in range(50)]).picture,
        DecidedNodes(slice_nodes=20),
    )
    picture = replace(picture, nodes=ObjectMap.of(picture.nodes), gpu_nodes=ObjectMap.of(picture.gpu_nodes))
    basis = basis_of(picture, SETTINGS, AT, memory)
    decided = [memory.decided for _ in slices(basis, picture, memory)]
    assert [before <= most for before, most in zip(decided, (25, 50), strict=True)] == [True, True]
    assert memory.decided == 50
    assert decide(picture, SETTINGS, (), AT, memory) == decide(picture, SETTINGS, (), AT)
    assert memory.decided == 50
    for number in range(PARTS_OF_A_MAP):
        memory.forget(number)
    decide(picture, SETTINGS, (), AT, memory)
    assert memory.decided == 100, "each node once a round"


def test_only_the_nodes_that_changed_are_decided() -> None:
    nodes, memory = [node("vm-vgpu", name=f"node{number:02}") for number in range(50)], DecidedNodes()
    observed_cluster = ObservedCluster(nodes)
    decide(observed_cluster.picture, SETTINGS, (), AT, memory)
    assert memory.decided == 50
    decide(observed_cluster.picture, SETTINGS, ("a write failed",), AT, memory)
    decide(
        replace(observed_cluster, nodes=[beating(item, 2) for item in nodes]).picture,
        SETTINGS,
        (),
        AT,
        memory,
    )
    assert memory.decided == 50, "heartbeats, and an equal policy, decide nothing"
    decide(
        replace(observed_cluster, nodes=[*nodes[1:], node("container", name="node00")]).picture,
        SETTINGS,
        (),
        AT,
        memory,
    )
    assert memory.decided == 51
    status = decide(observed_cluster.picture, SETTINGS, (), AT, memory)
    assert memory.decided == 52
    assert status == decide(observed_cluster.picture, SETTINGS, (), AT)
    decide(
        replace(observed_cluster, policies=[policy({"vfioManager": {"enabled": False}})]).picture,
        SETTINGS,
        (),
        AT,
        memory,
    )
    assert memory.decided == 102, "the policy counts for all nodes"


async def test_a_heartbeat_is_stored_and_wakes_nobody() -> None:
    changed, clock = Signal(), SimClock()
    store = Store(Collection(NODES, Node), changed, reads=read_of)
    item = node()
    key = key_of(item)
    store.observe(Delta({key: item}))
    await changed.wait()
    async with asyncio.TaskGroup() as group:
        waking = group.create_task(changed.wait())
        store.observe(Delta({key: beating(item, 7)}, frozenset({key})))
        await clock.settle()
        assert not waking.done()
        assert store.known[key].metadata.resource_version == "7"
        metadata = msgspec.structs.replace(item.metadata, labels={"a": "b"}, resource_version="8")
        store.observe(Delta({key: msgspec.structs.replace(item, metadata=metadata)}, frozenset({key})))
        await clock.settle()
        assert waking.done()


def test_only_the_node_of_a_pod_that_starts_is_decided_again() -> None:
    settings, cluster, memory = ControllerSettings("gpu-operator", image="gpuvirt:1"), Changing(), DecidedNodes()
    for name in NAMES:
        cluster.nodes = cluster.nodes.with_object(ObjectKey("", name), node("vm-vgpu", name=name))
    assert {len(verdict.codes) for verdict in decide(cluster.picture, settings, (), AT, memory).nodes} == {1}
    agent = Pod(Metadata(name="a", namespace="gpu-operator", labels={"app": "gpuvirt-node"}), PodSpec(NAMES[1]))
    cluster.pods = cluster.pods.with_object(key_of(agent), agent)
    found = decide(cluster.picture, settings, (), AT, memory)
    assert [len(verdict.codes) for verdict in found.nodes] == [1, 0, 1], "it has the pod that it lacked"
    assert found == decide(cluster.listed_again, settings, (), AT)
    assert memory.decided == 4
