"""A day of a schedule whose workers are KubeVirt's VMs."""

import asyncio
from uuid import uuid5

from typing_extensions import override

from gpuvirt_schedules.controller.kubevirt.virtualmachines import UUID_NAMESPACE
from tests.kube.scriptedapi import Call, Reply
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedkubevirt import NAMESPACE, Guest, ServedKubeVirt
from tests.schedules.servedschedule import LEASES, NODES, Object

KUBEVIRT: Object = {**SPEC, "hypervisor": {"kubeVirt": {"namespace": NAMESPACE}}, "leave": "ShutDown"}


class KubeVirtDay(Day):
    """Workers of four strategies, one of the night, and a GPU that only one phase's workers fit on."""

    def __init__(self, spec: Object = KUBEVIRT) -> None:
        super().__init__((1, 2, 3, 4))
        self.kubevirt = ServedKubeVirt()
        for number, strategy in enumerate(("Manual", "Always", "RerunOnFailure", "running"), 1):
            self.kubevirt.add(f"worker-{number}", strategy)
        self.kubevirt.add("worker-5", "Manual", gpu=16, runs=False)
        for guest in self.kubevirt.guests.values():
            self._put_node(guest)
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": spec})

    def _put_node(self, guest: Guest) -> None:
        """Store the node of a guest. KubeVirt shows no address of one that has never run: its node names the VM."""
        node = self.served.objects[f"{NODES}/{guest.name}"]
        assert isinstance(node["metadata"], dict)
        named = {"gpuvirt.io/vm": f"{NAMESPACE}/{guest.name}"} if not guest.boots else None
        status: Object = {
            "nodeInfo": {"systemUUID": str(uuid5(UUID_NAMESPACE, guest.name))},
            "addresses": [{"type": "InternalIP", "address": guest.address}],
        }
        metadata = {**node["metadata"], "annotations": named}
        self.served.put(f"{NODES}/{guest.name}", {**node, "metadata": metadata, "status": status})
        self.set_ready(guest.name, is_ready=bool(guest.boots))

    def answer(self, call: Call) -> Reply:
        return self.kubevirt.answer(call) if "kubevirt.io" in call.path else self.served.answer(call)

    @override
    async def sleep(self, seconds: float, /) -> None:
        await asyncio.sleep(0)  # noqa: TID251  other tasks have their turns
        self.now_s += max(seconds, 0.1)
        self.kubevirt.pass_time(self.now_s)
        for guest in self.kubevirt.guests.values():
            if guest.phase == "Running" and guest.deleted_s is None:
                renewal = f"{self.now():%Y-%m-%dT%H:%M:%S.%fZ}"
                self.served.put(f"{LEASES}/{guest.name}", {"spec": {"renewTime": renewal}})
                self.set_ready(guest.name)

    def running(self) -> list[str]:
        return [guest.name for guest in self.kubevirt.guests.values() if guest.phase == "Running"]
