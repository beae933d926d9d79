"""The desired state on disk: across restarts, truncated, not writable, of another node."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.store import agentstate
from gpuvirt.agent.store.agentstate import KeptDesired
from gpuvirt.agent.store.files import replace_file
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.keptstates import CONFIGS, REQUEST
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

observed_labels = st.none() | st.builds(Observed, st.none() | st.text(max_size=5))
texts = st.builds(ConfigText, st.text(max_size=20), st.text(max_size=5))
requests = st.builds(NodeRequest, observed_labels, st.none() | st.builds(Observed, st.none() | texts))


@given(st.builds(KeptDesired, st.just(NodeName("node01")), requests, st.none() | texts))
def test_a_written_desired_state_is_read_back(kept: KeptDesired) -> None:
    """Unknown, absent and a value stay three different states."""
    assert agentstate.DESIRED.decode(agentstate.DESIRED.encode(kept)).value == kept


def good_configs(folder: Path) -> ConfigText | None:
    return agentstate.DESIRED.decode((folder / "desired.json").read_bytes()).value.good_configs


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
        assert agentstate.DESIRED.decode((tmp_path / agentstate.DESIRED_FILE).read_bytes()).value.vgpu == REQUEST


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
    replace_file(
        tmp_path / agentstate.DESIRED_FILE, agentstate.DESIRED.encode(KeptDesired(NodeName("node02"), REQUEST))
    )
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()


async def test_a_damaged_file_is_moved_aside_and_the_desired_state_is_unknown(
    simulated: Simulated, tmp_path: Path
) -> None:
    (tmp_path / agentstate.DESIRED_FILE).write_bytes(b"torn")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.agent.observations.desired == NodeRequest()
        assert [note.code for note in node.view.problems] == [ReasonCode.DESIRED_STATE_LOST]
        assert (tmp_path / "desired.json.damaged").read_bytes() == b"torn"
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert node.view.problems == (), "a desired state that is observed again replaces the lost state"


async def test_a_file_that_cannot_be_written_is_reported_until_it_can(simulated: Simulated, tmp_path: Path) -> None:
    blocked = tmp_path / f".{agentstate.DESIRED_FILE}.new"
    blocked.mkdir()
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.agent.observations.take_request(REQUEST)
        await node.settle()
        assert [note.code for note in node.view.problems] == [ReasonCode.DESIRED_STATE_NOT_WRITTEN]
        assert node.agent.observations.desired == REQUEST
        blocked.rmdir()
        await node.advance(30)
        assert node.view.problems == ()
    assert agentstate.DESIRED.decode((tmp_path / agentstate.DESIRED_FILE).read_bytes()).value == KeptDesired(
        NodeName("node01"), REQUEST, CONFIGS
    )
