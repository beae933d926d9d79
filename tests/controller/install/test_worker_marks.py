"""The marks of schedules on worker nodes, as an uninstall removes or keeps them."""

from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt_schedules.controller.nodemarks import unmark_workers
from tests.kube.scriptedapi import scripted
from tests.schedules.scheduleday import Day
from tests.schedules.servedschedule import NODES, Object
from tests.web.certificates import Authority, Pair

LEAVES: Object = {"key": "gpuvirt.io/leaves-soon", "effect": "PreferNoSchedule"}
OWN: Object = {"key": "own", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}


def put(day: Day, name: str, ready: str, owner: str | None, *taints: Object) -> None:
    labels: Object = {"vgpu.type": "v100-4q", **({"gpuvirt.io/cordoned-by": owner} if owner is not None else {})}
    day.served.put(
        f"{NODES}/{name}",
        {
            "metadata": {"labels": labels},
            "spec": {"unschedulable": True, "taints": [OWN, *taints]},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        },
    )


async def unmarked(day: Day, authority: Authority, server: Pair) -> list[str]:
    async with scripted(day.served.answer, server, authority.certificate) as api:
        client = Client(Credentials("127.0.0.1", api.port, "gpuvirt", ca=authority.certificate, token=b"x"))
        lines = [line async for line in unmark_workers(client, day)]
        client.close()
    return lines


async def test_nodes_that_may_still_be_suspended_stay_cordoned_and_are_named(
    authority: Authority, server: Pair
) -> None:
    day = Day(())
    put(day, "worker-1", "Unknown", "gpus", LEAVES)
    put(day, "worker-2", "True", "gpus", LEAVES)
    put(day, "worker-3", "True", None)
    before_s = day.now_s
    lines = await unmarked(day, authority, server)
    assert day.now_s >= before_s + 15.0, "the connections of the last leader are dead"
    assert day.node("worker-1") == (None, None)
    assert day.node("worker-2") == (True, "gpus")
    assert day.node("worker-3") == (True, None), "an admin's cordon"
    assert [line.split(";")[0] for line in lines] == [
        "node worker-1: uncordoned",
        "node worker-2: stays cordoned, since VgpuSchedule gpus may be suspending its VM",
    ]
    for name in ("worker-1", "worker-2"):
        spec = day.served.objects[f"{NODES}/{name}"]["spec"]
        assert isinstance(spec, dict)
        assert spec["taints"] == [OWN]


async def test_nodes_without_marks_are_not_written_and_cost_no_time(authority: Authority, server: Pair) -> None:
    day = Day()
    before_s = day.now_s
    assert await unmarked(day, authority, server) == []
    assert (day.now_s, day.served.writes) == (before_s, [])
