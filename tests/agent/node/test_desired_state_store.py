"""The desired state on disk: across restarts, truncated, not writable, of another node."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent import metrics
from gpuvirt.agent.cluster import gpunode
from gpuvirt.agent.store import desiredstatestore
from gpuvirt.agent.store.desiredstatestore import KeptDesired
from gpuvirt.agent.store.files import replace_file
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.keptstates import CONFIGS, KEPT, REQUEST
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
observed_labels = st.none() | st.builds(Observed, st.none() | st.text(max_size=5))
texts = st.builds(ConfigText, st.text(max_size=20), st.text(max_size=5))
requests = st.builds(NodeRequest, observed_labels, st.none() | st.builds(Observed, st.none() | texts))


@given(st.builds(KeptDesired, st.just(NodeName("node01")), requests, st.none() | texts))
def test_a_written_desired_state_is_read_back(kept: KeptDesired) -> None:
    """Unknown, absent and a value stay three different states."""
    assert desiredstatestore.decode(desiredstatestore.encode(kept)).value == kept


@given(st.integers(0, len(desiredstatestore.encode(KEPT)) - 2))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(DamagedError):
        desiredstatestore.decode(desiredstatestore.encode(KEPT)[:length])


def good_configs(folder: Path) -> ConfigText | None:
    return desiredstatestore.decode((folder / "desired.json").read_bytes()).value.good_configs


async def test_an_agent_that_starts_without_the_api_server_uses_the_desired_state_on_disk(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()
        node.agent.observations.take_request(NodeRequest(config=Observed("A10-4Q")))
        node.agent.observations.take_request(NodeRequest(configs=Observed(CONFIGS)))
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == REQUEST
        node.agent.observations.take_request(NodeRequest(config=Observed(None), configs=Observed(None)))
        await node.settle()
        assert good_configs(tmp_path) == CONFIGS, "deleting the ConfigMap keeps the last good configs"
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest(Observed(None), Observed(None))
        assert good_configs(tmp_path) == CONFIGS


async def test_a_desired_state_is_on_disk_before_the_agent_ends(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert desiredstatestore.decode((tmp_path / desiredstatestore.FILE).read_bytes()).value.vgpu == REQUEST


async def test_only_a_changed_desired_state_publishes_a_new_view(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.settle()
        views = [node.view]
        for _ in range(2):
            node.agent.observations.take_request(REQUEST)
            await node.settle()
            views.append(node.view)
        assert views[0] is not views[1]
        assert views[1] is views[2]


async def test_the_desired_state_of_another_node_is_ignored(simulated: Simulated, tmp_path: Path) -> None:
    replace_file(tmp_path / desiredstatestore.FILE, desiredstatestore.encode(KeptDesired(NodeName("node02"), REQUEST)))
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()


async def test_a_file_of_an_earlier_version_is_taken_once(simulated: Simulated, tmp_path: Path) -> None:
    former = tmp_path / desiredstatestore.FORMER_FILE
    replace_file(former, desiredstatestore.encode(KEPT))
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == KEPT.vgpu
        assert not former.exists()
        assert desiredstatestore.decode((tmp_path / "desired.json").read_bytes()).value == KEPT


async def test_a_file_of_an_earlier_version_does_not_replace_a_newer_one(simulated: Simulated, tmp_path: Path) -> None:
    replace_file(tmp_path / desiredstatestore.FILE, desiredstatestore.encode(KEPT))
    replace_file(tmp_path / desiredstatestore.FORMER_FILE, desiredstatestore.encode(KeptDesired(NodeName("node01"))))
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == KEPT.vgpu


async def test_a_file_of_an_earlier_version_that_cannot_be_renamed_is_a_problem(
    simulated: Simulated, tmp_path: Path
) -> None:
    """A folder can't be renamed over a link, even by root."""
    (tmp_path / desiredstatestore.FORMER_FILE).mkdir()
    (tmp_path / desiredstatestore.FILE).symlink_to("missing")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()
        (problem,) = node.view.problems
        assert (problem.code, problem.subject) == (
            ReasonCode.DESIRED_STATE_LOST,
            str(tmp_path / desiredstatestore.FORMER_FILE),
        )
        assert "can't be renamed to desired.json: Not a directory" in problem.text
        assert 'gpuvirt_problems{reason="DesiredStateLost"} 1' in metrics.page(node.view, node.agent.telemetry)
        status = gpunode.status_of(node.view, GpuNode(metadata=Metadata(name="node01")), AT)
        assert problem.text in " ".join(condition.message for condition in status.conditions)
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert node.view.problems == (), "the next start reads desired.json"


async def test_a_damaged_file_is_moved_aside_and_the_desired_state_is_unknown(
    simulated: Simulated, tmp_path: Path
) -> None:
    (tmp_path / desiredstatestore.FILE).write_bytes(b"torn")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()
        assert [note.code for note in node.view.problems] == [ReasonCode.DESIRED_STATE_LOST]
        assert (tmp_path / "desired.json.damaged").read_bytes() == b"torn"
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert node.view.problems == (), "a desired state that is observed again replaces the lost state"


async def test_a_file_that_cannot_be_written_is_reported_until_it_can(simulated: Simulated, tmp_path: Path) -> None:
    blocked = tmp_path / f".{desiredstatestore.FILE}.new"
    blocked.mkdir()
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert [note.code for note in node.view.problems] == [ReasonCode.DESIRED_STATE_NOT_WRITTEN]
        assert node.agent.observations.desired == REQUEST
        blocked.rmdir()
        await node.advance(30)
        assert node.view.problems == ()
    assert desiredstatestore.decode((tmp_path / desiredstatestore.FILE).read_bytes()).value == KeptDesired(
        NodeName("node01"), REQUEST, CONFIGS
    )
