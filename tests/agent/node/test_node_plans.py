"""The plan of a node by `gpuvirt plan`, from its GpuNode alone, is the one that the node's agent carries out."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.shares.nodeshares import stored_shares
from gpuvirt.agent.shares.shareallocator import GpuChoice
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.desired.settings import IdleCount, OnDemandNames, OnDemandSettings, Settings, ShareSettings
from gpuvirt.model.node.shares import CdiReading
from gpuvirt.model.shares.annotations import placement
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Demand, Units
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.nvidiacdi import parse
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt.plans.nodeplan import BY_CATALOG, MIXED_MODE, NO_CARD, WHOLE, NodePlan, plan_node
from gpuvirt_sim.devices.nvidia import gpu_uuid
from tests.agent.node.nodewithvgpus import FIRST, ask, give_first_vgpu, reported
from tests.agent.node.simnode import SimNode, running_node, sharing_node
from tests.agent.shares.sharednode import nvidia_spec
from tests.inlineworker import InlineWorker
from tests.sim.simulated import Simulated

pytestmark = pytest.mark.usefixtures("worker")

HOSTS = {
    "4xT4": ("T4-4Q", "T4-8Q", "default", "A10-4Q"),
    "2xA10-vgpu": ("A10-4Q", "A10-24Q", "default", "T4-8Q"),
    "2xA10-sriov": ("A10-4Q", "A10-12Q", "default"),
    "4xL40S": ("L40S-12Q", "default"),
    "2xA10": ("A10-4Q",),
    "8xMI300X": ("A10-4Q",),
}
WHOLE_GPUS = DesiredMode.PASSTHROUGH
CASES: list[tuple[str, DesiredMode, DesiredMode, str | None]] = [
    (host, before, DesiredMode.VGPU, config)
    for host, configs in HOSTS.items()
    for before, config in itertools.product((DesiredMode.VGPU, DesiredMode.PASSTHROUGH), configs)
]
CASES += [(host, DesiredMode.VGPU, DesiredMode.PASSTHROUGH, None) for host in HOSTS]
CASES += [(host, before, DesiredMode.ON_DEMAND, None) for host in HOSTS for before in (DesiredMode.VGPU, WHOLE_GPUS)]
CASES += [(host, DesiredMode.ON_DEMAND, DesiredMode.VGPU, "default") for host in HOSTS]
CASES += [(host, DesiredMode.ON_DEMAND, WHOLE_GPUS, None) for host in HOSTS]


def plan(node: SimNode, mode: DesiredMode, config: str | None) -> NodePlan:
    name = ConfigName(config, Source(Origin.LABEL, "label")) if config is not None else None
    return plan_node(reported(node), mode, name, ConfigSet())


def carried(node: SimNode) -> dict[PciAddress, Counter[str]]:
    return {gpu.address: Counter(profile_name(vgpu.type) for vgpu in gpu.vgpus) for gpu in node.view.gpus}


LEFT_ALONE = {DesiredMode.UNMANAGED, DesiredMode.CONTAINER, DesiredMode.CLAIMS}
"""The modes that take no GPU from a driver for containers by themselves."""
NOT_KNOWN = {
    ("2xA10-vgpu", "A10-4Q"): MIXED_MODE,
    ("2xA10", "A10-4Q"): BY_CATALOG,
    ("2xA10", "default"): BY_CATALOG,
    ("2xA10", ""): BY_CATALOG,
}
"""Facts that only the node shows make the agent do less: a GPU in mixed-size mode, a driver without a vGPU manager."""


@pytest.mark.parametrize(("host", "before", "mode", "config"), CASES)
async def test_the_agent_does_what_the_plan_shows(
    simulated: Simulated, tmp_path: Path, host: str, before: DesiredMode, mode: DesiredMode, config: str | None
) -> None:
    async with running_node(simulated(host), tmp_path) as node:
        await ask(node, before, None)
        planned = plan(node, mode, config)
        was, modes = carried(node), {gpu.address: gpu.mode for gpu in node.view.gpus}
        await ask(node, mode, config)
        found = carried(node)
        assert found.keys() == {gpu.address for gpu in planned.gpus}
        for gpu in planned.gpus:
            assert gpu.vgpus_then is not None
            carries = found[PciAddress(gpu.address)]
            moved = modes[PciAddress(gpu.address)] != node.gpu(gpu.address).mode
            changed, then = was[PciAddress(gpu.address)] != carries or moved, Counter(gpu.vgpus_then)
            caveat = NOT_KNOWN.get((host, config or ""))
            if caveat in gpu.unknown and (then != carries or gpu.changes > changed):
                continue
            assert then == carries, gpu
            assert gpu.changes == changed, gpu


async def test_users_are_in_the_way_and_stay(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        await give_first_vgpu(node)
        planned = plan(node, DesiredMode.VGPU, "T4-4Q")
        first = planned.gpus[0]
        assert any("vm-a" in user for user in first.in_the_way)
        assert [reason.partition(":")[0] for reason in first.reasons] == ["VgpuInUse"]
        assert "-vf" not in str(planned)
        await ask(node, DesiredMode.VGPU, "T4-4Q")
        assert first.vgpus_then == carried(node)[FIRST] == {"T4-8Q": 1}
        assert sum((Counter(gpu.fits or {}) for gpu in planned.gpus), Counter()) == {"T4-4Q": 12}
        whole = plan(node, DesiredMode.PASSTHROUGH, None)
        assert [gpu.fits for gpu in whole.gpus] == [{}, *[{WHOLE: 1}] * 3]
        assert any("vm-a" in user for user in whole.gpus[0].in_the_way)
        assert whole.gpus[0].vgpus_then == {"T4-8Q": 1}
        assert whole.is_refused


async def test_an_older_agent_s_gpus_are_unknown_and_not_absent(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        await ask(node, DesiredMode.VGPU, "T4-8Q")
        now = reported(node)
        assert now.status is not None
        older = replace(
            now, status=replace(now.status, gpus=tuple(replace(gpu, planning=None) for gpu in now.status.gpus))
        )
    planned = plan_node(older, DesiredMode.VGPU, ConfigName("T4-4Q", Source(Origin.LABEL, "label")), ConfigSet())
    assert planned.gpus == ()
    assert [text.partition(": ")[0] for text in planned.unknown] == [gpu.address for gpu in now.status.gpus]
    assert planned.is_refused


@pytest.mark.parametrize("host", HOSTS)
async def test_the_plan_counts_what_a_node_on_demand_then_offers(
    simulated: Simulated, tmp_path: Path, host: str
) -> None:
    """An idle GPU lists one of each type by default, so that all that fit are compared."""
    settings = Settings(on_demand=OnDemandSettings(names=OnDemandNames.TYPE, idle_count=IdleCount.MAX))
    async with running_node(simulated(host), tmp_path, settings) as node:
        await ask(node, DesiredMode.VGPU, None)
        planned = plan(node, DesiredMode.ON_DEMAND, None)
        await ask(node, DesiredMode.ON_DEMAND, None)
        offered = Counter(
            {
                profile_name(resource.on_demand): len(resource.devices)
                for resource in node.view.resources
                if resource.on_demand is not None
            }
        )
        total = sum((Counter(gpu.fits or {}) for gpu in planned.gpus), Counter[str]())
        assert all(gpu.one_of for gpu in planned.gpus)
        if {BY_CATALOG, NO_CARD}.isdisjoint(text for gpu in planned.gpus for text in gpu.unknown):
            assert total == +offered


async def test_the_vgpu_of_a_pod_stays_on_a_node_on_demand(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path) as node:
        await give_first_vgpu(node)
        first, *others = plan(node, DesiredMode.ON_DEMAND, None).gpus
        assert first.vgpus == {"T4-8Q": 2}
        assert first.vgpus_then == {"T4-8Q": 1}
        assert first.fits == {"T4-8Q": 1}
        assert [gpu.vgpus_then for gpu in others] == [{}] * 3
        assert others[0].fits == {"T4-1Q": 16, "T4-2Q": 8, "T4-4Q": 4, "T4-8Q": 2, "T4-16Q": 1}
        await ask(node, DesiredMode.ON_DEMAND, None)
        assert carried(node)[FIRST] == {"T4-8Q": 1}


SHARE_POD, UNIT, MAIN = PodUid("8a5c0001-0000-4000-8000-000000000001"), DeviceId("u7"), ContainerName("main")


@pytest.mark.parametrize("mode", [mode for mode in DesiredMode if mode is not DesiredMode.SHARED])
@pytest.mark.parametrize("host", ["2xA10-vgpu", "4xT4"])
async def test_pods_with_shares_are_in_the_way_where_the_agent_waits_for_them(
    simulated: Simulated, tmp_path: Path, host: str, mode: DesiredMode
) -> None:
    files = SpecFiles(tmp_path / "cdi", (tmp_path / "cdi",))
    shares = stored_shares(tmp_path / "shares.json", files, InlineWorker(), ShareSettings())
    async with sharing_node(simulated(host), tmp_path, Settings(), shares) as node:
        await ask(node, DesiredMode.SHARED, None)
        first = node.view.gpus[0].address
        gpu = GpuId(gpu_uuid(first))
        shares.observe_node("containerd://2.1.3")
        spec = parse("nvidia.json", nvidia_spec({gpu: 0}).encode())
        assert spec is not None
        shares.observed.set(replace(shares.observed.get(), cdi=CdiReading((spec,), None)))
        node.agent.decide()
        demand = Demand((ContainerDemand(MAIN, ContainerKind.APP, Units(300)),))
        pod = PodOnNode(SHARE_POD, "default", "p", demand, placement(demand, {MAIN: {gpu: Units(300)}}))
        await GpuChoice(shares, node.agent.gpu_claims).choose(pod, UNIT)
        await node.report_account()
        config = "default" if mode is DesiredMode.VGPU else None
        planned = plan(node, mode, config)
        await ask(node, mode, config)
        waits = any((reason.code, reason.subject) == ("AllocatedToPod", first) for reason in node.view.problems)
        advised = [reason.fix or "" for reason in node.gpu(first).reasons if reason.code == "NativeDriver"]
        assert all(fix.startswith("delete the pod, or wait until it ends; then gpuvirt vfio bind") for fix in advised)
        assert advised or mode is not DesiredMode.CONTAINER or host != "2xA10-vgpu"
        shown = planned.gpus[0]
        assert shown.in_the_way == (("pod default/p",) if waits else ())
        if waits:
            assert (shown.changes, shown.fits, shown.vgpus_then) == (False, {}, {})
            assert planned.is_refused
        assert waits or mode in LEFT_ALONE or (host, mode) == ("4xT4", "on-demand")
