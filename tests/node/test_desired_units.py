"""The desired state of isolation units follows the GPUs that the host has."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.node.known.state import NodeState
from gpuvirt_sim.clock import SimClock
from tests.life.rigs import WHO
from tests.node.simnode import IDS
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
