"""The day of the document, with the controller, the child of its connection, pyVmomi and a simulated vCenter.

Four workers with a V100-4Q each serve by day, one with a V100-16Q by night, on one host with one GPU.
"""

from datetime import datetime
from pathlib import Path

import pytest

from tests.agent.kubelet.kubeletnode import until
from tests.schedules.controlled import WORKERS, controlled, vm_cluster
from tests.schedules.fastclock import FastClock
from tests.schedules.vmcluster import PATIENT
from tests.web.certificates import Authority, Pair

pytestmark = pytest.mark.ring("vsphere")
EVENING = datetime.fromisoformat("2026-01-05T18:57:00+00:00")
"""19:57 in Berlin, a Monday."""
MORNING = datetime.fromisoformat("2026-01-06T05:59:00+00:00")
RATE = 60.0


async def test_the_day_of_the_document(tmp_path: Path, authority: Authority, server: Pair) -> None:
    clock = FastClock(RATE, EVENING)
    with vm_cluster(tmp_path, authority, clock) as (cluster, vcenter):
        cluster.put_spec({**PATIENT, "announce": "2m"})
        async with controlled(cluster, server, authority.certificate):
            await until(lambda: cluster.has_reached("day"))
            assert all(cluster.running(name) for name in WORKERS)
            assert not cluster.running("worker4")
            assert vcenter.vsphere.state.calls == [], "the current phase holds already"

            await until(lambda: cluster.status().get("announced") == "night")
            await until(lambda: all("gpuvirt.io/leaves-soon" in cluster.taints(name) for name in WORKERS))
            assert all(cluster.running(name) for name in WORKERS)

            await until(lambda: cluster.has_reached("night"))
            assert vcenter.vsphere.state.power == {**dict.fromkeys(WORKERS, "suspended"), "worker4": "poweredOn"}
            assert cluster.cordons() == {**dict.fromkeys(WORKERS, (True, "gpus")), "worker4": (False, "")}
            await until(lambda: bool(cluster.running("worker4")))
            assert sorted(vcenter.vsphere.state.calls) == [
                "PowerOn worker4",
                *(f"Suspend {name}" for name in WORKERS),
            ], "each once"

            clock.skip(MORNING)  # a controller with nothing due reads the clock every 10 minutes
            await until(lambda: cluster.has_reached("day"))
            power = vcenter.vsphere.state.power
            assert power == {**dict.fromkeys(WORKERS, "poweredOn"), "worker4": "suspended"}
            assert cluster.cordons() == {**dict.fromkeys(WORKERS, (False, "")), "worker4": (True, "gpus")}
            await until(lambda: all(cluster.running(name) for name in WORKERS))
            await until(lambda: cluster.status().get("nextPhase") == "night")
    assert cluster.violations == []
    switch = ["PhaseAnnounced", "Switching", "PhaseReached"]
    assert [event["reason"] for event in cluster.events] == [*switch, *switch]
    assert cluster.conditions() == {
        "Ready": ("True", "PhaseReached"),
        "Valid": ("True", "Valid"),
        "Held": ("False", "NotHeld"),
    }
