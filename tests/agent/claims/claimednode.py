"""A node whose GPUs claims get, with the API server and the kubelet's record of claims played by the test."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from gpuvirt.agent.claims.preparing import ClaimRef, PreparedGpu, Preparing, ReservedClaim
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.facts.ids import ClaimUid, DeviceId, PciAddress, PodUid, ResourceName
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.allocation.claims import DRIVER, Claim, ClaimedGpu, Shape, device_name
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.reasons import Reason
from tests.agent.node.simnode import SimNode
from tests.inlineworker import InlineWorker

T = TypeVar("T")
CLAIMS = Settings(mode=DesiredMode.CLAIMS)
POOL = "node01/gpuvirt.io"


class BlockedWorker(InlineWorker):
    """A worker that the kernel may block."""

    is_blocked = False

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        if self.is_blocked:
            raise WorkerBlockedError(f"{name} takes more than {timeout_s:.0f} s")
        return await super().run(job, name=name, timeout_s=timeout_s)


def claim_of(name: str, *gpus: PciAddress, request: str = "gpu") -> Claim:
    """Return a claim that a scheduler has given whole GPUs for a VM, each by a request of its own."""
    requests = [request, *(f"{request}{number}" for number in range(1, len(gpus)))]
    return Claim(
        ClaimUid(f"uid-of-{name}"),
        "default",
        name,
        POOL,
        tuple(
            ClaimedGpu(of, gpu, Shape.PASSTHROUGH, device_name(gpu, Shape.PASSTHROUGH))
            for of, gpu in zip(requests, gpus, strict=True)
        ),
    )


def ref_of(claim: Claim) -> ClaimRef:
    return ClaimRef(claim.uid, claim.namespace, claim.name)


class ClaimedNode:
    """The node, and the claims that its API server has."""

    def __init__(self, node: SimNode, folder: Path, claims: Iterable[Claim]) -> None:
        self.node, self.folder = node, folder
        self.claims = {claim.uid: claim for claim in claims}
        self.asked = 0
        preparing = node.agent.preparing
        assert preparing is not None
        self.preparing: Preparing = preparing
        preparing.read = self._read

    async def _read(self, ref: ClaimRef) -> ReservedClaim:
        self.asked += 1
        return ReservedClaim(self.claims[ref.uid], frozenset({PodUid(f"pod-of-{ref.name}")}))

    async def _prepared(self, claim: Claim) -> tuple[PreparedGpu, ...] | Reason:
        try:
            return await self.preparing.prepare(ref_of(claim))
        except AllocationRefusedError as error:
            return error.reason

    async def prepare(self, claim: Claim, *, within_s: float = 60.0) -> tuple[PreparedGpu, ...] | Reason:
        """Let the kubelet ask for a claim, and time pass until it has an answer."""
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(self._prepared(claim))
            for _ in range(round(within_s)):
                await self.node.report_account()
                await self.node.advance(1)
                if asked.done():
                    break
            else:
                asked.cancel()
        found = asked.result()
        if not isinstance(found, Reason):
            self.record(claim)
            await self.node.report_account()
        return found

    async def interrupt(self, claim: Claim) -> None:
        """Let the kubelet ask for a claim, and the agent end before it has answered."""
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(self._prepared(claim))
            await self.node.settle()
            asked.cancel()

    async def unprepare(self, claim: Claim) -> Reason | None:
        try:
            await self.preparing.unprepare(ref_of(claim))
        except AllocationRefusedError as error:
            return error.reason
        for claimed in claim.gpus:
            self.node.free(claimed.gpu)
        await self.node.report_account()
        return None

    def record(self, claim: Claim) -> None:
        """Let the kubelet record the devices of a claim."""
        for claimed in claim.gpus:
            key = ResourceName(DRIVER), DeviceId(claimed.gpu)
            pod = Consumer(pod_uid=PodUid(f"pod-of-{claim.name}"))
            self.node.held[key] = pod
            self.node.recorded.containers[key] = frozenset({pod})

    def spec(self, claim: Claim) -> dict[str, object]:
        """Return the CDI spec of a claim; raise FileNotFoundError."""
        content: dict[str, object] = json.loads((self.folder / f"cdi/gpuvirt.io-claim-{claim.uid}.json").read_text())
        return content
