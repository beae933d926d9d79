"""The agent's part in shares, for tests without an agent: GPUs without gates, and decisions about shares alone."""

from collections.abc import Callable, Collection

from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.node.shares import NOT_OBSERVED, decide_shares
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.placement import GpuId


class OpenGpus:
    """Claims any GPU."""

    def why_closed(self, gpu: GpuId) -> Reason | None:
        del gpu
        return None

    def claim(self, gpus: Collection[GpuId], unit: DeviceId, record: Callable[[], None]) -> None:
        del gpus, unit
        record()


def decide(shares: NodeShares, offer: SharedOffer = NOT_OBSERVED) -> None:
    """Decide about shares, as the agent does."""
    shares.follow(decide_shares(shares.picture, shares.state.get(), offer))


async def decide_when_observed(shares: NodeShares) -> None:
    """Decide after each observation, until cancelled."""
    async for _ in shares.observed.follow():
        decide(shares)
