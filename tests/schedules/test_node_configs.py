"""A schedule with vGPU configs of nodes, in a controller that runs against an API server."""

from datetime import UTC, datetime

from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.resources import NODES
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.schedules.configcluster import NAMESPACE, SCHEDULES, SPEC, ConfigCluster, WallClock, before, scheduling
from tests.web.certificates import Authority, Pair

CONFIGS = 'version: v1\nvgpu-configs: {by-night: [{devices: all, vgpu-devices: {"A10-24Q": 1}}]}\n'
EVENING = datetime(2026, 1, 5, 20, tzinfo=UTC)
DAY, NIGHT = ("A10-4Q", "VgpuSchedule gpus phase day"), ("A10-24Q", "VgpuSchedule gpus phase night")
OF_LABEL = ("A10-8Q", "label nvidia.com/vgpu.config")


def with_node(*schedules: str) -> ConfigCluster:
    """Return a cluster with one node, whose label names another vGPU config."""
    cluster = ConfigCluster()
    cluster.put_node("bare01", pool="vgpu", vgpu_config="A10-8Q")
    for schedule in schedules:
        cluster.put_schedule(schedule)
    return cluster


async def test_a_node_gets_the_vgpu_config_of_each_phase_when_it_begins(authority: Authority, server: Pair) -> None:
    cluster, clock = with_node("gpus"), WallClock(before(EVENING, 1.0))
    async with scheduling(cluster, clock, authority, server) as process:
        await until(lambda: cluster.config("bare01") == DAY)
        cluster.report("bare01", "True", "Reconciled")
        await until(lambda: cluster.nodes("gpus") == [("bare01", "day", "A10-4Q", True, "")])
        clock.wall = EVENING
        await until(lambda: cluster.config("bare01") == NIGHT)
        pending = ("bare01", "night", "A10-24Q", False, "VgpuConfigPending")
        await until(lambda: cluster.nodes("gpus") == [pending])
        assert cluster.condition("gpus") == ("False", "VgpuConfigPending")
        cluster.report("bare01", "False", "VgpuInUse", "VM default/vm-1 uses a vGPU of type NVIDIA A10-4Q")
        await until(lambda: cluster.nodes("gpus") == [(*pending[:4], "VgpuInUse")])
        line = 'gpuvirt_schedule_waiting_nodes{schedule="gpus"}'
        await until(lambda: f"{line} 1" in process.pages()["/metrics"]().body)
        cluster.report("bare01", "True", "Reconciled")
        await until(lambda: cluster.condition("gpus") == ("True", "PhaseReached"))
        assert cluster.nodes("gpus") == [("bare01", "night", "A10-24Q", True, "")]
        await until(lambda: f"{line} 0" in process.pages()["/metrics"]().body)
        await until(lambda: {"VgpuInUse", "VgpuConfigApplied", "Switching"} <= cluster.events())


async def test_a_vgpu_config_that_does_not_exist_is_reported_before_its_phase_begins(
    authority: Authority, server: Pair
) -> None:
    cluster = ConfigCluster()
    cluster.put_policy("own-configs")
    cluster.put_node("bare01", pool="vgpu")
    day, night = phases()
    cluster.put_schedule("gpus", spec={"phases": [day, {**night, "vgpuConfig": "by-night"}]})
    async with scheduling(cluster, WallClock(before(EVENING, 7200.0)), authority, server) as process:
        await until(lambda: cluster.condition("gpus", "ConfigsKnown") == ("False", "ConfigInvalid"))
        await until(lambda: cluster.config("bare01") == DAY)
        assert cluster.condition("gpus", "Valid") == ("True", "Valid")
        await until(lambda: "ConfigInvalid" in cluster.events())
        line = 'gpuvirt_schedule_configs_known{schedule="gpus",reason='
        await until(lambda: f'{line}"ConfigInvalid"}} 0' in process.pages()["/metrics"]().body)
        cluster.put_configs("own-configs", "[")
        await until(lambda: cluster.condition("gpus", "ConfigsKnown") == ("Unknown", "VgpuConfigsUnknown"))
        cluster.put_configs("own-configs", CONFIGS)
        await until(lambda: cluster.condition("gpus", "ConfigsKnown") == ("True", "ConfigsKnown"))
        await until(lambda: f'{line}"ConfigsKnown"}} 1' in process.pages()["/metrics"]().body)
        cluster.put_schedule("gpus", 2, spec={"phases": [day, {**night, "vgpuConfig": "A10-4QQ"}]})
        await until(lambda: cluster.condition("gpus", "ConfigsKnown") == ("False", "ConfigInvalid"))
        assert "did you mean A10-4Q?" in str(cluster.stored(SCHEDULES, "gpus"))


async def test_a_controller_whose_clock_lags_gives_no_node_the_config_of_the_phase_before(
    authority: Authority, server: Pair
) -> None:
    cluster = with_node("gpus")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)
        await until(lambda: cluster.nodes("gpus") != [])
    async with scheduling(cluster, WallClock(before(EVENING, 600.0)), authority, server):
        cluster.put_node("bare02", pool="vgpu")
        await until(lambda: cluster.config("bare02")[0] is not None)
        await until(lambda: len(cluster.nodes("gpus")) == 2)
        assert (cluster.config("bare01"), cluster.config("bare02")) == (NIGHT, NIGHT)
        assert {phase for _, phase, *_ in cluster.nodes("gpus")} == {"night"}


async def test_a_switch_that_was_missed_is_made_once_a_controller_runs(authority: Authority, server: Pair) -> None:
    cluster = with_node("gpus")
    async with scheduling(cluster, WallClock(before(EVENING, 3600.0)), authority, server):
        await until(lambda: cluster.config("bare01") == DAY)
    later = EVENING.replace(day=8, hour=22)
    async with scheduling(cluster, WallClock(later), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)


async def test_a_node_that_is_labelled_or_unlabelled_follows_at_once(authority: Authority, server: Pair) -> None:
    cluster = with_node("gpus")
    cluster.put_node("bare02")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)
        await until(lambda: cluster.config("bare02")[0] == "default")
        cluster.put_node("bare02", pool="vgpu")
        cluster.put_node("bare01", vgpu_config="A10-8Q")
        await until(lambda: cluster.config("bare02") == NIGHT)
        await until(lambda: cluster.config("bare01") == OF_LABEL)
        await until(lambda: [entry[0] for entry in cluster.nodes("gpus")] == ["bare02"])


async def test_a_suspended_schedule_keeps_what_nodes_have(authority: Authority, server: Pair) -> None:
    cluster, clock = with_node("gpus"), WallClock(before(EVENING, 60.0))
    async with scheduling(cluster, clock, authority, server):
        await until(lambda: cluster.config("bare01") == DAY)
        cluster.put_schedule("gpus", 2, suspend=True)
        clock.wall = EVENING
        cluster.put_node("bare03", pool="vgpu", vgpu_config="A10-8Q")
        await until(lambda: cluster.config("bare03") == OF_LABEL)
        assert cluster.config("bare01") == DAY
        cluster.put_schedule("gpus", 3)
        await until(lambda: (cluster.config("bare01"), cluster.config("bare03")) == (NIGHT, NIGHT))


async def test_a_schedule_with_a_fault_keeps_what_nodes_have_and_is_reported(
    authority: Authority, server: Pair
) -> None:
    cluster = with_node("gpus")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)
        cluster.put_schedule("gpus", 2, timeZone="Europe/Berlim")
        await until(lambda: cluster.condition("gpus", "Valid") == ("False", "TimeZoneUnknown"))
        assert cluster.config("bare01") == NIGHT


async def test_a_node_that_two_schedules_cover_keeps_what_it_has(authority: Authority, server: Pair) -> None:
    cluster = with_node("gpus")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)
        cluster.put_schedule("other", spec={"phases": [{**phase, "vgpuConfig": "A10-2Q"} for phase in phases()]})
        await until(lambda: cluster.condition("other", "Valid") == ("False", "NodeInTwoSchedules"))
        assert cluster.config("bare01") == NIGHT
        cluster.put_node("bare04", pool="vgpu", vgpu_config="A10-8Q")
        await until(lambda: cluster.config("bare04") == OF_LABEL)


async def test_a_schedule_that_is_deleted_leaves_nodes_to_their_labels(authority: Authority, server: Pair) -> None:
    cluster = with_node("gpus")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == NIGHT)
        cluster.remove_schedule("gpus")
        await until(lambda: cluster.config("bare01") == OF_LABEL)


async def test_a_schedule_of_another_namespace_changes_no_node(authority: Authority, server: Pair) -> None:
    cluster = with_node()
    cluster.put_elsewhere("gpus", "tenant")
    async with scheduling(cluster, WallClock(EVENING), authority, server):
        await until(lambda: cluster.config("bare01") == OF_LABEL)
        await CLOCK.sleep(0.5)
        assert cluster.config("bare01") == OF_LABEL
    assert NAMESPACE != "tenant"


async def test_no_node_is_decided_before_the_schedules_are_observed(authority: Authority, server: Pair) -> None:
    cluster = with_node("gpus")
    cluster.hides_schedules = True
    async with scheduling(cluster, WallClock(EVENING), authority, server) as process:
        await until(lambda: cluster.count("watch", NODES) > 0 and cluster.count("watch", GPU_NODES) > 0)
        await CLOCK.sleep(0.5)
        assert cluster.config("bare01") == (None, None), "the label would change vGPUs that the schedule keeps"
        assert "vgpuschedules" in process.pages()["/readyz"]().body
        cluster.hides_schedules = False
        await until(lambda: cluster.config("bare01") == NIGHT)


def phases() -> list[dict[str, object]]:
    """Return the phases of the schedule."""
    found = SPEC["phases"]
    assert isinstance(found, list)
    return found
