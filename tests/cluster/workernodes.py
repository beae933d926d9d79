"""Nodes of worker VMs: kwok plays the kubelet of each, and stands still while the VM of a simulated vCenter is off."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from lab.cluster.kwok import kwok
from lab.vsphere.simulator import VSphere

from tests.cluster.labnamespace import LabNamespace

WORKERS: Mapping[str, str] = {
    **{f"worker{number}": "v100-4q-4GB" for number in range(4)},
    "worker4": "v100-16q-16GB",
}
"""The label `vgpu.type` of each worker's node; VMs have the names of their nodes."""

RENEWED_EVERY_S = 2
"""How often a played kubelet renews its Lease: kwok renews after a quarter of its duration. A kubelet takes 10 s."""

PLAYED: Mapping[str, str] = {"key": "gpuvirt.test/played", "effect": "NoSchedule"}
"""Keeps programs that have to run away from nodes where nothing runs."""


class _Spec(msgspec.Struct, frozen=True):
    unschedulable: bool = False


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _Status(msgspec.Struct, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class _Node(msgspec.Struct, frozen=True):
    spec: _Spec = _Spec()
    status: _Status = _Status()


class WorkerNodes:
    """The nodes, and the processes that play their kubelets."""

    def __init__(self, node: LabNamespace, vsphere: VSphere) -> None:
        self._node = node
        self._vsphere = vsphere
        self._kubelets: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator["WorkerNodes"]:
        """Register the nodes; then each kubelet runs while its VM runs."""
        with ExitStack() as stack:
            for name, vgpu_type in WORKERS.items():
                played = played_node(self._node, name, {"vgpu.type": vgpu_type}, _provider_id(name))
                self._kubelets[name] = stack.enter_context(played)
            self._node.until(lambda: all(map(self.is_ready, WORKERS)), lambda: f"{self.ready()}")
            follower = threading.Thread(target=self._follow)
            follower.start()
            stack.callback(follower.join)
            stack.callback(self._over.set)
            yield self

    def powers(self) -> Mapping[str, str]:
        return self._vsphere.state.power

    def cordoned(self) -> set[str]:
        return {name for name in WORKERS if self._read(name).spec.unschedulable}

    def is_ready(self, name: str) -> bool:
        return any((found.type, found.status) == ("Ready", "True") for found in self._read(name).status.conditions)

    def ready(self) -> set[str]:
        return {name for name in WORKERS if self.is_ready(name)}

    def _read(self, name: str) -> _Node:
        found = self._node.cluster.api.get(f"/api/v1/nodes/{name}")
        assert found is not None, f"there is no node {name}"
        return msgspec.json.decode(found, type=_Node)

    def _follow(self) -> None:
        """Stop and continue kubelets as the VMs are suspended and resumed."""
        while not self._over.wait(0.1):
            powers = self._vsphere.state.power
            for name, kubelet in self._kubelets.items():
                is_on = powers[name] == "poweredOn"
                os.kill(kubelet.pid, signal.SIGCONT if is_on else signal.SIGSTOP)


def _provider_id(name: str) -> str:
    """Return the providerID of a worker, with the UUID of its VM: a played kubelet reports no system UUID."""
    return f"vsphere://4217aaaa-0000-0000-0000-{int(name.removeprefix('worker')):012}"


@contextmanager
def played_node(
    node: LabNamespace, name: str, labels: Mapping[str, str], provider_id: str = ""
) -> Iterator["subprocess.Popen[bytes]"]:
    """Register a node for the duration of the context, and give the process that plays its kubelet."""
    metadata = {"name": name, "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}}
    spec = {"taints": [PLAYED], "providerID": provider_id}
    node.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec})
    kubeconfig = f"--kubeconfig={node.cluster.kubeconfig}"
    lease = f"--node-lease-duration-seconds={4 * RENEWED_EVERY_S}"
    command = [*kwok(), kubeconfig, f"--manage-single-node={name}", lease]
    log: Path = node.cluster.folder / f"log/kwok-{name}.log"
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()  # also ends one that is stopped
            node.cluster.kubectl("delete", "node", name, "--ignore-not-found")
