"""The enforcement of new pods' shares on a node: by its GpuNode, its label, the settings, and while it is unknown."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.agent.cluster.gpunode import request_of_spec, status_of
from gpuvirt.agent.cluster.nodelabels import shared_claim
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.kinds.gpunode import DesiredShares, GpuNode, Origins, SharesStatus, Spec
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.enforcement import (
    LABEL,
    OF_LABEL,
    OF_SETTINGS,
    OF_SPEC,
    DesiredEnforcement,
    enforcement_of,
)
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.invalid import InvalidDesired, Source
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Enforcement, Settings, ShareSettings
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.sharedgpus import SharedGpus
from tests.agent.node.simnode import SimNode, running_node
from tests.agent.shares.limitednode import LIMITING, WITH_MEMORY, enforce
from tests.agent.shares.opengpus import decide
from tests.agent.shares.sharednode import GPUS, SharedNode, shared_node
from tests.sim.simulated import Simulated

A, _ = GPUS
NONE, HAMI = Enforcement.NONE, Enforcement.HAMI_CORE
SHARED = Settings(mode=DesiredMode.SHARED)
LIMITED = Settings(mode=DesiredMode.SHARED, shares=ShareSettings(enforcement=HAMI))
NO_LABEL: Observed[str] = Observed(None)
BY_LABEL = Observed("hami-core")
NO_SPEC: Observed[GpuNodeSpec] = Observed(None)
NO_OPINION = Observed(GpuNodeSpec("shared"))
OFF, ON = (Observed(GpuNodeSpec("shared", enforcement=text)) for text in ("none", "hami-core"))


@pytest.mark.parametrize(
    ("spec", "label", "settings", "found"),
    [
        (NO_SPEC, NO_LABEL, SHARED, (NONE, OF_SETTINGS)),
        (NO_SPEC, NO_LABEL, LIMITED, (HAMI, OF_SETTINGS)),
        (NO_SPEC, BY_LABEL, SHARED, (HAMI, OF_LABEL)),
        (NO_SPEC, Observed("none"), LIMITED, (NONE, OF_LABEL)),
        (NO_OPINION, BY_LABEL, SHARED, (HAMI, OF_LABEL)),
        (NO_OPINION, NO_LABEL, LIMITED, (HAMI, OF_SETTINGS)),
        (OFF, BY_LABEL, LIMITED, (NONE, OF_SPEC)),
        (ON, NO_LABEL, SHARED, (HAMI, OF_SPEC)),
        (ON, None, SHARED, (HAMI, OF_SPEC)),
        (None, BY_LABEL, SHARED, (HAMI, OF_LABEL)),
        (NO_SPEC, None, LIMITED, None),
        (NO_OPINION, None, SHARED, None),
    ],
)
def test_a_gpunode_takes_precedence_over_the_label_and_the_label_over_the_settings(
    spec: Observed[GpuNodeSpec] | None,
    label: Observed[str] | None,
    settings: Settings,
    found: tuple[Enforcement, Source] | None,
) -> None:
    expected = DesiredEnforcement(*found) if found is not None else None
    assert enforcement_of(NodeRequest(spec=spec, enforcement=label), settings) == expected


@pytest.mark.parametrize(
    ("request_", "source"),
    [
        (NodeRequest(enforcement=Observed("hami_core")), OF_LABEL),
        (NodeRequest(spec=Observed(GpuNodeSpec("shared", enforcement="hami_core")), enforcement=BY_LABEL), OF_SPEC),
    ],
)
def test_an_unknown_value_is_invalid_and_named(request_: NodeRequest, source: Source) -> None:
    found = enforcement_of(request_, SHARED)
    assert isinstance(found, InvalidDesired)
    assert (found.origin, found.where, found.found) == (source.origin, source.where, "hami_core")
    assert "did you mean hami-core?" in found.reason.text


def test_a_spec_without_a_value_has_no_opinion() -> None:
    for shares, expected in ((None, None), (DesiredShares(), None), (DesiredShares(enforcement=NONE), "none")):
        spec = request_of_spec(Spec(mode=DesiredMode.SHARED, shares=shares)).spec
        assert spec is not None
        assert spec.value is not None
        assert spec.value.enforcement == expected


def shared(node: SimNode) -> tuple[Enforcement | None, bool, bool]:
    """Return what limits new pods, whether the shared GPUs are known, and whether units are offered."""
    gpus = node.view.shared
    return gpus.enforcement, gpus.is_known, bool(gpus.capacity)


def of_status(node: SimNode) -> SharesStatus | None:
    return status_of(node.view, GpuNode(metadata=Metadata(name="node01")), node.view.at).shares


async def ask(node: SimNode, request: NodeRequest) -> None:
    node.agent.observations.take_request(request)
    await node.report_account()
    await node.settle()


async def test_units_are_offered_once_it_is_known_what_limits_them(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await node.report_account()
        assert shared(node) == (None, False, False)
        assert of_status(node) is None
        reasons = {gpu.withheld.code for gpu in node.view.shared.gpus if gpu.withheld is not None}
        assert reasons == {ReasonCode.API_SERVER_AWAY}
        annotations = shared_claim(node.agent.views).keys(Metadata(name="node01")).annotations
        assert not annotations.keys() & {SHARED_GPUS_ANNOTATION, LIMITS_ANNOTATION}
        await ask(node, NodeRequest(enforcement=BY_LABEL))
        assert shared(node) == (HAMI, True, True)
        assert of_status(node) == SharesStatus(enforcement=HAMI, origin=f"label {LABEL}")
        assert (
            shared_claim(node.agent.views).keys(Metadata(name="node01")).annotations[LIMITS_ANNOTATION] == "hami-core"
        )
        await ask(node, NodeRequest(enforcement=NO_LABEL))
        assert of_status(node) == SharesStatus(enforcement=NONE, origin="settings $.shares.enforcement")
        annotations = shared_claim(node.agent.views).keys(Metadata(name="node01")).annotations
        assert annotations.keys() >= {SHARED_GPUS_ANNOTATION, LIMITS_ANNOTATION}
        assert annotations[LIMITS_ANNOTATION] is None


async def test_an_agent_that_watches_its_gpunode_waits_for_its_spec(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("vm-2xV100"), tmp_path, SHARED, watches_gpu_node=True) as node:
        await ask(node, NodeRequest(workload=Observed(None), enforcement=BY_LABEL))
        assert shared(node)[0] is None
        await ask(node, NodeRequest(spec=OFF))
        assert shared(node) == (NONE, True, True)
        assert of_status(node) == SharesStatus(enforcement=NONE, origin="GpuNode $.spec.shares.enforcement")
        await ask(node, NodeRequest(spec=NO_OPINION))
        assert shared(node) == (HAMI, True, True)


async def test_an_invalid_value_changes_nothing_also_after_a_restart(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await ask(node, NodeRequest(enforcement=BY_LABEL))
        await ask(node, NodeRequest(enforcement=Observed("hami")))
        assert shared(node) == (HAMI, True, True)
        assert {problem.code for problem in node.view.problems} == {ReasonCode.CONFIG_INVALID}
    async with running_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await node.report_account()
        assert shared(node) == (HAMI, True, True)
        assert [invalid.found for invalid in node.view.invalid] == ["hami"]
        await ask(node, NodeRequest(enforcement=NO_LABEL))
        assert shared(node) == (NONE, True, True)
        assert not node.view.invalid


async def test_an_invalid_first_value_offers_nothing(simulated: Simulated, tmp_path: Path) -> None:
    """The node may be meant to have limits; without them, a pod would start beside what an admin has set."""
    async with running_node(simulated("vm-2xV100"), tmp_path, SHARED) as node:
        await ask(node, NodeRequest(enforcement=Observed("hami")))
        assert shared(node) == (None, False, False)
        assert [invalid.found for invalid in node.view.invalid] == ["hami"]
        withheld = [gpu.withheld for gpu in node.view.shared.gpus]
        assert {reason.code for reason in withheld if reason is not None} == {ReasonCode.CONFIG_INVALID}, (
            "the API server is not away: it has answered"
        )
        assert all("hami" in reason.text for reason in withheld if reason is not None)


async def test_a_switch_counts_for_new_containers_at_once_and_running_ones_keep_theirs(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        first = await node.admit("first", 300, gpu=A)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0" in (await node.start(first)).env
        observe(node, NONE)
        second = await node.admit("second", 300, gpu=A)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in (await node.start(second)).env
        assert "CUDA_DEVICE_MEMORY_LIMIT_0" in (await node.start(first)).env, "a restart of its container"
        observe(node, HAMI)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0" not in (await node.start(second)).env
        found = {node.records.pods[PodUid(pod.uid)].enforcement for pod in (first, second)}
        assert found == {NONE, HAMI}


def observe(node: SharedNode, enforcement: Enforcement) -> None:
    """Have the agent observe another enforcement, while the accounts of its GPUs are incomplete."""
    memory = WITH_MEMORY.memory_mib if enforcement is HAMI else {}
    decide(node.agent.shares, SharedOffer(SharedGpus(enforcement=enforcement), memory_mib=memory))
    state = node.agent.shares.state.get()
    assert (state.node.enforcement, state.published.enforcement) == (enforcement, enforcement)
    assert state.node.capacity, "the offered units stay as they are"


@pytest.mark.parametrize(("manager", "ours"), [("gpuvirt", True), ("kubectl-patch", False)])
def test_a_gpunode_with_an_admins_enforcement_is_not_the_controllers_alone(manager: str, ours: bool) -> None:
    fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:shares": {"f:enforcement": {}}}}}
    metadata = msgspec.convert({"name": "node01", "managedFields": [fields]}, ManagedMetadata)
    spec = Spec(origins=Origins(), shares=DesiredShares(enforcement=HAMI))
    assert OwnedGpuNode(metadata=metadata, spec=spec).is_ours_alone is ours


async def test_unknown_limits_leave_all_as_it_is(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        before = node.agent.shares.state.get()
        decide(node.agent.shares, SharedOffer())
        assert node.agent.shares.state.get() == before
        decide(node.agent.shares, SharedOffer(SharedGpus(enforcement=HAMI)))
        assert node.agent.shares.state.get().published == replace(LIMITING, capacity=before.published.capacity)
        assert LIMITING.capacity[A] == Units(1000)


async def test_the_gpus_that_are_known_replace_those_before(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        decide(node.agent.shares, SharedOffer(SharedGpus(is_known=True, enforcement=HAMI)))
        assert not node.agent.shares.state.get().published.capacity
