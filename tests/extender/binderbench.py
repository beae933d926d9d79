"""A binder beside an API server, whose events reach its index when a test reports them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.clock import RealClock
from gpuvirt.extender.binding import Binder
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.protocol import BindingArguments
from gpuvirt.extender.writes import CannotBindError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.client import Client
from gpuvirt.shares.sharing import Sharing
from tests.extender.namedobjects import Object
from tests.extender.podapi import Lease, PodApi, serving
from tests.extender.pods import IndexUnderTest, decoded_pod, node


@dataclass
class Bench:
    """A binder beside an API server; events reach its index when the test reports them."""

    api: PodApi
    known: IndexUnderTest
    binder: Binder
    lease: Lease
    client: Client

    def add(self, content: Object) -> None:
        """Create a pod, and report it to the index."""
        self.api.put("pods", content)
        self.report(decoded_pod(content).metadata.name)

    def report(self, name: str) -> None:
        """Report a pod as the API server has it now."""
        self.known.pods(self.api.pods[f"default/{name}"])

    async def bind(self, name: str, to: str = "n", uid: str = "") -> str:
        """Bind a pod, and return the error."""
        try:
            await self.binder.bind(BindingArguments(name, "default", PodUid(uid or f"uid-{name}"), NodeName(to)))
        except CannotBindError as error:
            return str(error)
        return ""


@asynccontextmanager
async def benched(folder: Path, intervals: ExtenderIntervals = INTERVALS) -> AsyncIterator[Bench]:
    api, known = PodApi(), IndexUnderTest()
    known.nodes(node("n", a=1000, b=500), node("m", c=1000))
    known.pods()
    async with serving(api.answer, folder) as served:
        lease = Lease()
        binder = Binder(served.client, known.index, Sharing(), RealClock(), lease.is_held, intervals)
        await binder.begin_term()
        yield Bench(api, known, binder, lease, served.client)
