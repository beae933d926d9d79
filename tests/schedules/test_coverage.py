"""Workers that an autoscaler or a health check would delete while they are away: the schedule is refused, by name."""

from collections.abc import Callable

import pytest

from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.hypervisor import Power
from tests.schedules.scheduleday import Day, playing
from tests.schedules.schedulequestions import asking, put_secret
from tests.schedules.servedschedule import CHECKS, CLUSTER_API, CONFIG_MAPS, MACHINE_API, NODES, Object
from tests.web.certificates import Authority, Pair

NAMES = [f"worker-{number}" for number in range(1, 6)]
EXCLUDED = {"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"}
AUTOSCALER = f"{CONFIG_MAPS.replace('/configmaps', '/namespaces/scaling/configmaps')}/cluster-autoscaler-status"
OPENSHIFT = {"machine.openshift.io/machine": "openshift-machine-api/gpu-1"}
FLEET = {"cluster.x-k8s.io/machine": "gpu-1", "cluster.x-k8s.io/cluster-namespace": "fleet"}
MINE = {"role": "gpu"}


def annotate(day: Day, names: list[str], annotations: dict[str, str]) -> None:
    for name in names:
        node = day.served.objects[f"{NODES}/{name}"]
        metadata = node["metadata"]
        assert isinstance(metadata, dict)
        day.served.put(f"{NODES}/{name}", {**node, "metadata": {**metadata, "annotations": annotations}})


def put_autoscaler(day: Day) -> None:
    day.served.put(AUTOSCALER, {"metadata": {"namespace": "scaling"}})


def put_machine(day: Day, place: str, cluster: str = "", **annotations: str) -> None:
    day.served.kinds.update(CHECKS)
    found = {key.replace("_", "/"): value for key, value in annotations.items()}
    metadata: Object = {"labels": MINE, "annotations": found}
    day.served.put(f"{place}/machines/gpu-1", {"metadata": metadata, "spec": {"clusterName": cluster}})


def put_check(day: Day, place: str, selected: dict[str, str], cluster: str = "", **more: object) -> None:
    spec: Object = {"clusterName": cluster, "selector": {"matchLabels": selected}}
    metadata: Object = {"namespace": place.rpartition("/")[2], **more}
    day.served.put(f"{place}/machinehealthchecks/short", {"metadata": metadata, "spec": spec})


async def refusal(day: Day, authority: Authority, server: Pair) -> tuple[str, str]:
    """Return reason and message of the condition Valid after one round, in which nothing else may be written."""
    day.served.writes.clear()
    async with playing(day, server, authority.certificate) as (rounds, _):
        await rounds.round()
    conditions = day.status()["conditions"]
    assert isinstance(conditions, list)
    (valid,) = [condition for condition in conditions if condition["type"] == "Valid"]
    if valid["status"] == "False":
        assert [write for write in day.served.writes if "vgpuschedules" not in write] == []
        assert [vm.power for vm in day.hypervisor.vms.values()] == [Power.ON] * 4 + [Power.SUSPENDED]
    return valid["reason"], valid["message"]


async def test_workers_of_a_cluster_with_an_autoscaler_are_excluded_from_it(authority: Authority, server: Pair) -> None:
    day = Day()
    put_autoscaler(day)
    annotate(day, NAMES[1:], EXCLUDED)
    code, message = await refusal(day, authority, server)
    assert code == ReasonCode.WORKER_AUTOSCALED
    assert "node worker-1" in message
    assert "worker-2" not in message
    annotate(day, NAMES, EXCLUDED)
    assert await refusal(day, authority, server) == ("Valid", "")


async def test_a_plan_and_a_check_name_what_to_annotate(authority: Authority, server: Pair) -> None:
    day = Day()
    put_secret(day)
    put_autoscaler(day)
    async with asking(day, server, authority.certificate) as questions:
        plan, check = await questions.plan("gpus"), await questions.check("gpus")
    assert plan.forecast is None
    assert not check.holds
    assert [reason.code for reason in plan.schedule.reasons] == [ReasonCode.WORKER_AUTOSCALED] * 5
    fix = plan.schedule.reasons[0].fix
    assert fix is not None
    assert "kubectl annotate node worker-1 cluster-autoscaler.kubernetes.io/scale-down-disabled=true" in fix


def covered(day: Day) -> None:
    put_machine(day, MACHINE_API)
    put_check(day, MACHINE_API, MINE)


def covered_by_all(day: Day) -> None:
    put_machine(day, MACHINE_API)
    put_check(day, MACHINE_API, {})


def of_other_machines(day: Day) -> None:
    put_machine(day, MACHINE_API)
    put_check(day, MACHINE_API, {"role": "web"})


def paused(day: Day) -> None:
    put_machine(day, MACHINE_API)
    put_check(day, MACHINE_API, MINE, annotations={"cluster.x-k8s.io/paused": ""})


def skipped_by_the_cluster_api_alone(day: Day) -> None:
    put_machine(day, MACHINE_API, **{"cluster.x-k8s.io_skip-remediation": ""})
    put_check(day, MACHINE_API, MINE)


@pytest.mark.parametrize(
    ("put", "is_covered"),
    [
        (covered, True),
        (covered_by_all, True),
        (of_other_machines, False),
        (paused, False),
        (skipped_by_the_cluster_api_alone, True),
    ],
)
async def test_a_machine_of_openshift_is_covered_by_checks_that_select_it(
    put: Callable[[Day], None], *, is_covered: bool, authority: Authority, server: Pair
) -> None:
    day = Day()
    annotate(day, NAMES[:1], OPENSHIFT)
    put(day)
    code, message = await refusal(day, authority, server)
    assert code == (ReasonCode.WORKER_HEALTH_CHECKED if is_covered else "Valid")
    assert ("MachineHealthCheck openshift-machine-api/short" in message) is is_covered


@pytest.mark.parametrize(
    ("cluster", "annotation", "is_covered"),
    [("gpus", "", True), ("web", "", False), ("gpus", "skip-remediation", False), ("gpus", "paused", False)],
)
async def test_a_machine_of_the_cluster_api_is_covered_by_checks_of_its_cluster(
    cluster: str, annotation: str, *, is_covered: bool, authority: Authority, server: Pair
) -> None:
    day = Day()
    annotate(day, NAMES[:1], FLEET)
    put_machine(day, CLUSTER_API, "gpus", **({f"cluster.x-k8s.io_{annotation}": ""} if annotation else {}))
    put_check(day, CLUSTER_API, MINE, cluster)
    code, _ = await refusal(day, authority, server)
    assert code == (ReasonCode.WORKER_HEALTH_CHECKED if is_covered else "Valid")


async def test_a_machine_of_a_management_cluster_is_unknown_until_an_admin_vouches_for_it(
    authority: Authority, server: Pair
) -> None:
    day = Day()
    annotate(day, NAMES[:1], FLEET)
    code, message = await refusal(day, authority, server)
    assert code == ReasonCode.MACHINE_UNKNOWN
    assert "Machine fleet/gpu-1 of cluster.x-k8s.io" in message
    put_autoscaler(day)
    annotate(day, NAMES, {**FLEET, "gpuvirt.io/may-leave": "true"})
    assert await refusal(day, authority, server) == ("Valid", "")


async def test_what_the_controller_may_not_read_is_not_taken_for_absent(authority: Authority, server: Pair) -> None:
    day = Day()
    day.served.forbidden.add(CONFIG_MAPS)
    code, message = await refusal(day, authority, server)
    assert code == ReasonCode.COVERAGE_UNKNOWN
    assert "configmaps" in message
    put_secret(day)
    async with asking(day, server, authority.certificate) as questions:
        assert (await questions.plan("gpus")).forecast is not None, "an admin may have fewer rights than the controller"


async def test_workers_that_nothing_covers_are_not_looked_at_in_each_round(authority: Authority, server: Pair) -> None:
    day = Day()
    async with playing(day, server, authority.certificate) as (rounds, _):
        for _ in range(3):
            await rounds.round()
        assert day.served.lists.count(CONFIG_MAPS) == 1
        annotate(day, NAMES[:1], FLEET)
        assert await rounds.round() == 60.0
    assert day.conditions()["Valid"] == ("False", "MachineUnknown")
