"""The checks of nodes by `gpuvirt schedule check` before a phase begins: from the reports of their agents."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuMode, Spec
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt_schedules.commands import schedulerender
from gpuvirt_schedules.commands.schedulequestions import ScheduleQuestions
from gpuvirt_schedules.decide.reports import NodeCheck, ScheduleCheck
from tests.agent.node.nodewithvgpus import FIRST
from tests.schedules.coverednode import NODE, POLICY, covered, put_report
from tests.schedules.scheduleday import Day
from tests.schedules.schedulequestions import asking
from tests.sim.simulated import Simulated
from tests.web.certificates import Authority, Pair

CONFIG_MAP = "/api/v1/namespaces/gpuvirt/configmaps/own-configs"


def nights(found: ScheduleCheck) -> NodeCheck:
    """Return what a check says of the night."""
    (night,) = (node for node in found.nodes if node.phase == "night")
    assert night.node == NODE
    return night


async def checked(day: Day, authority: Authority, server: Pair) -> ScheduleCheck:
    """Return the check of a schedule."""
    async with asking(day, server, authority.certificate) as questions:
        return await questions.check("gpus")


OWNED = [{"manager": "kubectl-edit", "fieldsV1": {"f:spec": {"f:vgpuConfig": {}}}}]


async def test_a_check_names_the_vgpus_that_would_change_and_who_uses_them(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    day = covered("T4-4Q")
    await put_report(day, simulated, tmp_path, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    found = await checked(day, authority, server)
    night = nights(found)
    assert night.reason is None
    assert found.holds, "who uses vGPUs now may be gone by then"
    for gpu in night.gpus:
        then = {"T4-8Q": 1} if gpu.address == FIRST else {"T4-4Q": 4}
        assert (gpu.vgpus, gpu.vgpus_then) == ({"T4-8Q": 2}, then)
    assert len(night.gpus) == 4
    assert night.in_the_way == ("VM default/vm-a",), "a VM and its pod are one user"
    (other,) = (node for node in found.nodes if node.phase == "day")
    assert (other.gpus, other.reason, other.unknown) == ((), None, ())
    schedulerender.check(found)
    text = capsys.readouterr().out
    assert "4 GPUs" in text
    assert f"{FIRST}: 2 x T4-8Q -> 1 x T4-8Q (while these users stay)" in text
    assert "VgpuInUse" in text
    assert "No known obstacle keeps the nodes from switching." in text
    assert not day.served.writes


@pytest.mark.parametrize(
    ("night", "spec", "metadata", "code", "words"),
    [
        ("T4-9Q", Spec(mode=DesiredMode.VGPU), {}, "ConfigInvalid", "names the vGPU config T4-9Q, which does"),
        ("A10-4Q", Spec(mode=DesiredMode.VGPU), {}, "ConfigInvalid", "selects no GPU of this node"),
        ("T4-4Q", Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"), {"managedFields": OWNED}, "VgpuConfigOverridden",
         "set in its GpuNode by kubectl-edit"),
        ("T4-4Q", Spec(mode=DesiredMode.PASSTHROUGH), {}, "ModeWithoutVgpus", "the mode of the node is passthrough"),
    ],
)  # fmt: skip
async def test_a_check_says_why_a_node_would_not_get_the_vgpu_config(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair, capsys: pytest.CaptureFixture[str],
    night: str, spec: Spec, metadata: Mapping[str, object], code: str, words: str,
) -> None:  # fmt: skip
    day = covered(night)
    await put_report(day, simulated, tmp_path, spec, **metadata)
    found = await checked(day, authority, server)
    reason = nights(found).reason
    assert reason is not None
    assert str(reason.code) == code
    assert words in reason.text
    assert not found.holds
    schedulerender.check(found)
    text = " ".join(capsys.readouterr().out.split())
    assert words in text
    assert "The schedule can't switch all nodes." in text


async def test_a_gpu_in_mode_vgpu_of_a_node_in_another_mode_is_planned(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair
) -> None:
    day = covered("T4-4Q")
    second = "0000:86:00.0"
    spec = Spec(mode=DesiredMode.UNMANAGED, gpus=(GpuMode(address=second, mode=DesiredMode.VGPU),))
    await put_report(day, simulated, tmp_path, spec)
    night = nights(await checked(day, authority, server))
    assert [(gpu.address, gpu.vgpus_then) for gpu in night.gpus] == [(second, {"T4-4Q": 4})]


async def test_the_configs_of_the_cluster_s_config_map_are_known(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair
) -> None:
    day = covered("by-night", config_map="own-configs")
    await put_report(day, simulated, tmp_path, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    missing = nights(await checked(day, authority, server))
    assert missing.reason is not None
    assert "ConfigMap gpuvirt/own-configs" in missing.reason.text
    text = 'version: v1\nvgpu-configs: {by-night: [{devices: all, vgpu-devices: {"T4-16Q": 1}}]}\n'
    day.served.put(CONFIG_MAP, {"data": {"config.yaml": text}})
    known = nights(await checked(day, authority, server))
    assert known.reason is None
    assert {name for gpu in known.gpus for name in gpu.vgpus_then or ()} == {"T4-8Q", "T4-16Q"}


@pytest.mark.parametrize("text", ["version: v2", "["])
async def test_configs_that_can_t_be_read_are_unknown_and_not_missing(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair, text: str
) -> None:
    """The agents may know the name by the earlier text."""
    day = covered("by-night", config_map="own-configs")
    await put_report(day, simulated, tmp_path, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    day.served.put(CONFIG_MAP, {"data": {"config.yaml": text}})
    found = await checked(day, authority, server)
    night = nights(found)
    assert night.reason is None
    assert night.unknown
    assert found.holds


@pytest.mark.parametrize("path", [POLICY.rpartition("/")[0], CONFIG_MAP, GPU_NODES.path])
async def test_what_a_user_may_not_read_is_unknown(
    simulated: Simulated, tmp_path: Path, authority: Authority, server: Pair,
    capsys: pytest.CaptureFixture[str], path: str,
) -> None:  # fmt: skip
    day = covered("by-night", config_map="own-configs")
    await put_report(day, simulated, tmp_path, Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q"))
    day.served.forbidden.add(path)
    found = await checked(day, authority, server)
    night = nights(found)
    assert (night.reason, night.gpus) == (None, ())
    assert "forbidden" in night.unknown[0]
    schedulerender.check(found)
    assert "not known: " in capsys.readouterr().out


async def test_a_cluster_without_policy_or_gpunodes(authority: Authority, server: Pair) -> None:
    day = covered("by-night")
    day.served.delete(POLICY)
    day.served.kinds.clear()
    found = await checked(day, authority, server)
    reason = nights(found).reason
    assert reason is not None
    assert "it has no GpuNode" in reason.text
    assert "gpuvirt status" in (reason.fix or "")


async def test_a_check_of_workers_alone_reads_no_gpunode(authority: Authority, server: Pair) -> None:
    async with asking(Day(), server, authority.certificate) as questions:
        assert isinstance(questions, ScheduleQuestions)
        found = await questions.check("gpus")
    assert found.nodes == ()
