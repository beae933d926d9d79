"""The writes of a schedule to KubeVirt's VMs on a real API server, by KubeVirt's own kinds where they are present.

No virt-controller runs: the test makes its writes.
"""

import json

import pytest
from lab.cluster.kubevirtkinds import SOURCES

from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ConflictError
from gpuvirt.kube.kinds.kubevirt import StateChange, Vm, Vmi
from gpuvirt.kube.resources import Collection
from gpuvirt.model.workers.hypervisor import Accepted, Action, Call, Power, VmKey, VmProof, VmsUnknown, WorkerVm
from gpuvirt.model.workers.spec import SAVED_STRATEGY
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms, VmWriter
from gpuvirt_schedules.controller.kubevirt.virtualmachines import VmObjects, virtual_machines
from tests.cluster.kubevirtkinds import install
from tests.cluster.labnamespace import LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

SMALL, BIG = "nvidia.com/GRID_A10-4Q", "nvidia.com/GRID_A10-8Q"


class Workers:
    """A VM in the test's namespace, and the back end."""

    def __init__(self, node: LabNamespace) -> None:
        self.node = node
        self.client = Client(from_kubeconfig(node.cluster.kubeconfig))
        self.vms = KubeVirtVms(self.client, node.namespace)

    def make(self, **strategy: object) -> None:
        """Create a VM, and its VMI, which runs."""
        spec = {"domain": {"devices": {"gpus": [{"name": "gpu", "deviceName": SMALL}]}}}
        self._create("VirtualMachine", {**strategy, "template": {"spec": spec}})
        uid = self.node.kubectl("get", "virtualmachines.kubevirt.io", "worker", "-o", "jsonpath={.metadata.uid}")
        owner = {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "worker", "uid": uid}
        self._create("VirtualMachineInstance", spec, {**owner, "controller": True})
        self.status("vmi", {"phase": "Running"})

    def _create(self, kind: str, spec: object, *owners: object) -> None:
        metadata = {"name": "worker", "ownerReferences": owners}
        text = json.dumps({"apiVersion": "kubevirt.io/v1", "kind": kind, "metadata": metadata, "spec": spec})
        done = self.node.cluster.kubectl("--namespace", self.node.namespace, "create", "-f", "-", given=text)
        assert done.returncode == 0, done.stderr

    def status(self, kind: str, status: object) -> None:
        """Write a status, as virt-controller does."""
        name = {"vm": "virtualmachines.kubevirt.io", "vmi": "virtualmachineinstances.kubevirt.io"}[kind]
        text = json.dumps({"status": status})
        # KubeVirt's VMIs have no subresource for their status.
        part = ["--subresource=status"] if kind == "vm" else []
        self.node.kubectl("patch", name, "worker", "--type=merge", *part, "-p", text)
        if kind == "vmi" and not self.node.kubectl("get", name, "worker", "-o", "jsonpath={.status.phase}"):
            self.node.kubectl("patch", name, "worker", "--type=merge", "--subresource=status", "-p", text)

    def end(self) -> None:
        """Delete the VMI, as virt-controller does."""
        self.node.kubectl("delete", "virtualmachineinstances.kubevirt.io", "worker")

    async def vm(self) -> Vm:
        return await self.client.get(virtual_machines(self.node.namespace), "worker", Vm)

    async def seen(self) -> WorkerVm:
        reading = await self.vms.read()
        assert not isinstance(reading, VmsUnknown), reading
        return next(iter(reading.values()))

    async def call(self, action: Action, vgpu_type: str = "") -> None:
        vm = await self.seen()
        assert await self.vms.call(Call(VmProof(vm.key, vm.instance), action, vgpu_type)) == Accepted()


@pytest.fixture(params=SOURCES)
def workers(node: LabNamespace, request: pytest.FixtureRequest) -> Workers:
    """A cluster with KubeVirt's kinds, by our facts and by KubeVirt's manifests."""
    install(node, request.param)
    return Workers(node)


@pytest.mark.parametrize("strategy", [{"runStrategy": "Always"}, {"running": True}], ids=["Always", "running"])
async def test_a_strategy_is_saved_halted_and_restored(workers: Workers, strategy: dict[str, object]) -> None:
    workers.make(**strategy)
    before = (await workers.vm()).spec
    assert ((await workers.seen()).power, (await workers.seen()).is_changing) == (Power.ON, False)
    await workers.call(Action.SHUT_DOWN)
    halted = await workers.vm()
    assert (halted.spec.strategy, halted.saved) == ("Halted", strategy.get("runStrategy", "running"))
    assert (await workers.seen()).is_changing
    workers.end()
    assert ((await workers.seen()).power, (await workers.seen()).is_changing) == (Power.OFF, False)
    await workers.call(Action.START)
    restored = await workers.vm()
    assert restored.spec == before
    assert SAVED_STRATEGY not in restored.metadata.annotations


async def test_requests_are_written_into_the_status_and_the_spec_stays(workers: Workers) -> None:
    workers.make(runStrategy="Manual")
    before = (await workers.vm()).metadata.generation
    uid = workers.node.kubectl("get", "virtualmachineinstances.kubevirt.io", "worker", "-o", "jsonpath={.metadata.uid}")
    await workers.call(Action.SHUT_DOWN)
    assert (await workers.vm()).status.state_change_requests == (StateChange("Stop", uid),)
    workers.end()
    workers.status("vm", {"stateChangeRequests": None})
    await workers.call(Action.SET_VGPU_TYPE, BIG)
    assert (await workers.seen()).vgpu_types == (BIG,)
    await workers.call(Action.START)
    after = await workers.vm()
    assert after.status.state_change_requests == (StateChange("Start"),)
    assert after.metadata.generation == before + 1, "the vGPU type alone"


async def test_writes_for_another_version_are_conflicts(workers: Workers) -> None:
    workers.make(runStrategy="Always")
    vmi = Vmi((await workers.vm()).metadata)
    old = VmObjects(await workers.vm(), vmi)
    workers.node.kubectl("annotate", "virtualmachines.kubevirt.io", "worker", "by=admin")
    writer, proof = VmWriter(workers.client, workers.node.namespace), VmProof(VmKey(old.vm.metadata.uid))
    manual = VmObjects(Vm(old.vm.metadata, type(old.vm.spec)(None, "Manual", template=old.vm.spec.template)), vmi)
    with pytest.raises(ConflictError):
        await writer.make(Call(proof, Action.SHUT_DOWN), old)
    with pytest.raises(ConflictError):
        await writer.make(Call(proof, Action.SHUT_DOWN), manual)
    with pytest.raises(ConflictError):
        await writer.make(Call(proof, Action.SET_VGPU_TYPE, BIG), old)
    found = (await workers.client.list(Collection(virtual_machines(workers.node.namespace), Vm))).items
    assert [(vm.spec.strategy, vm.status.state_change_requests) for vm in found] == [("Always", ())]
