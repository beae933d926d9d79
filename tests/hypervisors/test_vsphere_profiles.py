"""A simulated vCenter's VM has a quarter of the GPU by day and all of it by night, by the controller's own rounds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.model.workers.hypervisor import Hypervisor, Power, WorkerVm
from gpuvirt_schedules.controller.rounds import Rounds
from gpuvirt_schedules.controller.scheduleapi import ScheduleObjects
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.simulated import Center, center, connected, vms
from tests.kube.scriptedapi import scripted
from tests.schedules.scheduleday import SCHEDULE, SPEC, Day
from tests.schedules.servedschedule import LEASES, NODES, Object
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("vsphere")
SMALL, LARGE = "grid_v100-4q", "grid_v100-16q"
PAUSE_S = 0.05


class Evening(Day):
    """The workers of a simulated vCenter. The schedule's time passes faster than the vCenter's."""

    def __init__(self, found: Mapping[str, WorkerVm]) -> None:
        super().__init__(())
        self.served.delete(f"{NODES}/worker-5")
        workers: Object = {"matchLabels": {"pool": "gpu"}}
        small: Object = {"vgpuType": SMALL, "labels": {"vgpu.type": "v100-4q"}}
        large: Object = {"vgpuType": LARGE, "labels": {"vgpu.type": "v100-16q"}}
        phases: list[Object] = [
            {"name": "day", "start": "0 7 * * 1-5", "workers": workers, "profiles": [small]},
            {
                "name": "night",
                "start": "0 20 * * 1-5",
                "workers": {"matchLabels": {"at": "night"}},
                "profiles": [large],
            },
        ]
        self.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {**SPEC, "phases": phases}})
        for number in range(4):
            labels = {"pool": "gpu", "vgpu.type": "v100-4q", **({"at": "night"} if number == 0 else {})}
            name, ready = f"worker{number}", [{"type": "Ready", "status": "True"}]
            status = {"conditions": ready, "nodeInfo": {"systemUUID": found[name].system_uuid}}
            self.served.put(f"{NODES}/{name}", {"metadata": {"labels": labels}, "status": status})

    @override
    async def sleep(self, seconds: float, /) -> None:
        await RealClock().sleep(PAUSE_S)
        self.now_s += max(seconds, 0.1)
        for number in range(4):
            renewal = f"{self.now():%Y-%m-%dT%H:%M:%S.%fZ}"
            self.served.put(f"{LEASES}/worker{number}", {"spec": {"renewTime": renewal}})


@pytest.fixture(name="center")
def _center(tmp_path: Path, authority: Authority) -> Iterator[Center]:
    with center(tmp_path, authority) as running:
        yield running


async def test_a_worker_gets_the_whole_gpu_at_night(center: Center, authority: Authority, server: Pair) -> None:
    async with connected(center.credentials) as hypervisor:
        evening = Evening(await vms(hypervisor))
        await evening_of(evening, hypervisor, server, authority.certificate)
        found = await vms(hypervisor)
    assert (found["worker0"].power, found["worker0"].vgpu_types) == (Power.ON, (LARGE,))
    assert {found[f"worker{number}"].power for number in (1, 2, 3)} == {Power.SUSPENDED}
    calls = [call for call in center.vsphere.state.calls if call.endswith(" worker0")]
    assert [call.split()[0] for call in calls] == ["Shutdown", "Reconfigure", "PowerOn"]
    assert center.vsphere.state.calls[-1] == "PowerOn worker0", "after all others were confirmed off"
    metadata = evening.served.objects[f"{NODES}/worker0"]["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["labels"] == {"pool": "gpu", "at": "night", "vgpu.type": "v100-16q"}
    assert evening.status()["phase"] == "night"


async def evening_of(evening: Evening, hypervisor: ChildHypervisor, server: Pair, ca: Path) -> None:
    """Run the rounds until the night is reached."""

    async def connect() -> Hypervisor:
        return hypervisor

    async with scripted(evening.served.answer, server, ca) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=ca, token=b"x"))
        objects = ScheduleObjects(client, "gpuvirt", "gpus", evening)
        rounds = Rounds(objects, VmCalls(connect, evening, lambda: True, 0.0), evening)
        while (pause_s := await rounds.round()) is not None:
            await evening.sleep(pause_s)
        client.close()
