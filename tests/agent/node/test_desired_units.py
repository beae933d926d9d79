"""The desired state of isolation units: it follows the GPUs that the host has, and refuses commands against it."""

import pytest

from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.change.desired import VGPUS, DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt_sim.clock import SimClock
from tests.agent.life.rigs import WHO
from tests.agent.node.simnode import IDS
from tests.sim.simulated import Simulated

FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
WHOLE = DesiredGpu(DesiredDriver.PASSTHROUGH, DesiredVgpus(whole=True))


def test_an_unplugged_gpu_is_left_out_of_the_desired_units(simulated: Simulated) -> None:
    """The reconciler may run between an observation and the computation of the desired units."""
    kernel, clock = simulated("2xA10"), SimClock()
    state = NodeState(NodeTerms(Settings(mode=DesiredMode.PASSTHROUGH), IDS, WHO), Ledger())
    state.observe_request(NodeRequest())
    state.observe_facts(scan(kernel))
    state.decide(clock.monotonic_s(), clock.now())
    desired = state.decisions.desired
    assert {gpu: target for unit in desired.by_unit(state.inventory).values() for gpu, target in unit.items()} == {
        FIRST: WHOLE,
        SECOND: WHOLE,
    }
    kernel.unplug(FIRST)
    state.observe_facts(scan(kernel))
    assert [dict(unit) for unit in desired.by_unit(state.inventory).values()] == [{SECOND: WHOLE}]


@pytest.mark.parametrize(
    ("desired", "command", "is_kept"),
    [
        (DesiredGpu(DesiredDriver.PASSTHROUGH), "native", True),
        (DesiredGpu(DesiredDriver.PASSTHROUGH), "passthrough", False),
        (DesiredGpu(DesiredDriver.PASSTHROUGH), VGPUS, False),
        (DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 6})), "native", False),
        (DesiredGpu(vgpus=DesiredVgpus({"A10-4Q": 6})), VGPUS, True),
    ],
)
def test_a_command_is_refused_that_the_agent_would_undo(desired: DesiredGpu, command: str, *, is_kept: bool) -> None:
    units = DesiredUnits(NodeVgpus(desired={FIRST: desired}))
    assert (units.why_kept({FIRST: [command]}) is not None) == is_kept
    assert units.why_kept({SECOND: [command]}) is None
