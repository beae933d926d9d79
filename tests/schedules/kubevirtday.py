"""A day of a schedule whose workers are KubeVirt's VMs."""

import asyncio

from typing_extensions import override

from tests.apiserver.scriptedapi import Call, Reply
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedkubevirt import NAMESPACE, ServedKubeVirt
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
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": spec})

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
                ready: Object = {"conditions": [{"type": "Ready", "status": "True"}]}
                node = self.served.objects[f"{NODES}/{guest.name}"]
                self.served.put(f"{NODES}/{guest.name}", {**node, "status": ready})

    def running(self) -> list[str]:
        return [guest.name for guest in self.kubevirt.guests.values() if guest.phase == "Running"]
