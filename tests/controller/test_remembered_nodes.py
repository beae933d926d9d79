"""Decisions with a memory: equal to those from scratch after any changes, and made only for the nodes that changed."""

import asyncio
from dataclasses import dataclass, field, replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.clock import Signal
from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Collection
from gpuvirt.cluster.kinds.core import Condition, Node, NodeInfo, NodeStatus, Pod, PodSpec
from gpuvirt.cluster.kinds.gpunode import Gpu, Spec, Status
from gpuvirt.cluster.objects import key_of
from gpuvirt.cluster.operator.decisions import ControllerSettings, decide
from gpuvirt.cluster.operator.nodedecisions import NodeMemory
from gpuvirt.cluster.operator.nodes.resolve import OwnedGpuNode, OwnedMetadata
from gpuvirt.cluster.operator.picture import read_of
from gpuvirt.cluster.operator.store import Store
from gpuvirt.cluster.resources import NODES, Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.sim.clock import SimClock
from tests.controller.scene import AT, NFD, SETTINGS, Scene, node, policy

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
        st.sampled_from(["", "vm-vgpu", "vm-passthrough", "container", "shared", "wrong"]),
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


@dataclass
class Changing:
    """A cluster that events change."""

    nodes: dict[str, Node] = field(default_factory=dict)
    gpu_nodes: dict[str, OwnedGpuNode] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    vgpus: bool = True
    vms: bool = True

    def change(self, data: st.DataObject) -> None:
        """Make one event happen."""
        name = data.draw(st.sampled_from(NAMES))
        match data.draw(st.sampled_from(["node", "no node", "gpu node", "no gpu node", "pod", "no pod", "policy"])):
            case "node":
                self.nodes[name] = data.draw(NODES_OF[name])
            case "no node":
                self.nodes.pop(name, None)
            case "gpu node":
                spec = Spec(mode=data.draw(st.sampled_from(DesiredMode)))
                metadata = OwnedMetadata(name=name, generation=1)
                self.gpu_nodes[name] = OwnedGpuNode(metadata=metadata, spec=spec, status=data.draw(REPORTS))
            case "no gpu node":
                self.gpu_nodes.pop(name, None)
            case "pod":
                app = data.draw(st.sampled_from(APPS))
                pod = Pod(Metadata(name=f"{app}-{name}", namespace="gpu-operator", labels={"app": app}), PodSpec(name))
                self.pods[pod.metadata.name] = pod
            case "no pod":
                self.pods.pop(data.draw(st.sampled_from(sorted(self.pods) or [""])), None)
            case _:
                self.vgpus, self.vms = data.draw(st.booleans()), data.draw(st.booleans())

    @property
    def scene(self) -> Scene:
        """The objects of the cluster."""
        fields = {"sandboxWorkloads": {"enabled": self.vms}, "vgpuDeviceManager": {"enabled": self.vgpus}}
        return Scene(
            tuple(self.nodes.values()),
            (policy(fields),),
            gpu_nodes=tuple(self.gpu_nodes.values()),
            pods=tuple(self.pods.values()),
        )


@given(st.data(), st.booleans(), st.booleans())
def test_decisions_with_a_memory_equal_those_from_scratch(data: st.DataObject, coexists: bool, deploys: bool) -> None:
    settings = ControllerSettings("gpu-operator", coexists=coexists, image="gpuvirt:1" if deploys else None)
    cluster, memory = Changing(), NodeMemory()
    for _ in range(data.draw(st.integers(1, 12))):
        cluster.change(data)
        picture = cluster.scene.picture
        assert decide(picture, settings, (), AT, memory) == decide(picture, settings, (), AT)


def test_only_the_nodes_that_changed_are_decided() -> None:
    nodes, memory = [node("vm-vgpu", name=f"node{number:02}") for number in range(50)], NodeMemory()
    scene = Scene(nodes)
    decide(scene.picture, SETTINGS, (), AT, memory)
    assert memory.decided == 50
    decide(scene.picture, SETTINGS, ("a write failed",), AT, memory)
    decide(replace(scene, nodes=[beating(item, 2) for item in nodes]).picture, SETTINGS, (), AT, memory)
    assert memory.decided == 50, "heartbeats, and an equal policy, decide nothing"
    decide(replace(scene, nodes=[*nodes[1:], node("container", name="node00")]).picture, SETTINGS, (), AT, memory)
    assert memory.decided == 51
    status = decide(scene.picture, SETTINGS, (), AT, memory)
    assert memory.decided == 52
    assert status == decide(scene.picture, SETTINGS, (), AT)
    decide(replace(scene, policies=[policy({"vfioManager": {"enabled": False}})]).picture, SETTINGS, (), AT, memory)
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
