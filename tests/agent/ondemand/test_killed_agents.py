"""Hundreds of pods of three types on eight GPUs, while agent and kubelet are killed at random."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from gpuvirt_sim.kubelet.kubelet import Pod, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.agent.ondemand.kubeletnodes import T4_1Q, T4_8Q, T4_16Q, MortalAgent, Node, host, options_of, start_at_last
from tests.thoroughness import sized

PODS = sized(950, 80)
BETWEEN_SETTLED = 40
"""How many pods start between two moments at which all is settled."""
MOST_RUNNING = 40
FIRST_WITHIN_S = 0.4
"""When the first program is killed after pods begin to start, at the latest."""


@dataclass
class Fates:
    """Starts and ends pods on one node, and kills agent and kubelet meanwhile."""

    node: Node
    agent: MortalAgent
    random: Random
    group: asyncio.TaskGroup
    had: set[str] = field(default_factory=set)
    """The vGPUs of all pods so far."""
    kills: Counter[str] = field(default_factory=Counter)
    admission: asyncio.Task[Pod | None] | None = None

    async def start(self, name: str, resource: str) -> bool:
        """Start a pod; return False if it was refused, or lost with the kubelet that admitted it."""
        self.admission = self.group.create_task(self._admitted(name, resource))
        try:
            pod = await self.admission
        except asyncio.CancelledError:
            return False
        if pod is None:
            return False
        await start_at_last(self.node, pod)
        vgpus = self.node.vgpus[name]
        assert len(vgpus) == 1
        assert not vgpus & self.had
        self.had |= vgpus
        return True

    async def _admitted(self, name: str, resource: str) -> Pod | None:
        try:
            return await self.node.admit(name, resource)
        except AdmissionError:
            return None

    async def kill(self, first: str) -> None:
        """Kill the agent or the kubelet at a moment that no pod chooses, and start it again; without an end.

        The first one comes soon: forty pods on an idle computer may take less time than the others are apart.
        """
        program, most_s = first, FIRST_WITHIN_S
        while True:
            await CLOCK.sleep(self.random.uniform(0.0, most_s))
            self.kills[program] += 1
            await asyncio.shield(self._replace_agent() if program == "agent" else self._replace_kubelet())
            program, most_s = "agent" if self.random.random() < 0.7 else "kubelet", 4.0

    async def _replace_agent(self) -> None:
        await self.agent.kill()
        await CLOCK.sleep(self.random.uniform(0.0, 0.3))
        await self.agent.start()

    async def _replace_kubelet(self) -> None:
        if self.admission is not None and self.admission.cancel():
            with suppress(asyncio.CancelledError):
                await self.admission
        await self.node.kubelet.restart()

    async def settle(self) -> None:
        """Wait until exactly the vGPUs of the pods that run are left."""
        assert self.node.given <= self.node.live
        await until(partial(_has, self.node, self.node.given))

    async def play(self, first: int, count: int) -> None:
        """Start so many pods, and end others."""
        for number in range(first, first + count):
            resource = self.random.choice((T4_1Q, T4_1Q, T4_8Q, T4_16Q))
            while not await self.start(f"pod-{number}", resource):
                assert self.node.given <= self.node.live
                if self.random.random() < 0.1:  # a full node has room again
                    self._end_one()
                await CLOCK.sleep(0.05)
            while len(self.node.vgpus) > MOST_RUNNING or (self.node.vgpus and self.random.random() < 0.45):
                self._end_one()
            assert self.node.given <= self.node.live

    def _end_one(self) -> None:
        if self.node.vgpus:
            self.node.end(self.random.choice(sorted(self.node.vgpus)))


def _has(node: Node, vgpus: set[str]) -> bool:
    return node.live == vgpus


@pytest.mark.timeout(sized(1800, 600))
async def test_no_vgpu_is_without_its_pod_and_no_pod_without_its_vgpu(short_path: Path) -> None:
    kernel = host(8)
    async with running(short_path, CLOCK) as kubelet, asyncio.TaskGroup() as group:
        agent = MortalAgent(options_of(kernel, short_path), kubelet, group)
        await agent.start()
        fates = Fates(Node(kernel, kubelet, short_path), agent, Random(27), group)  # noqa: S311
        await fates.node.until_all_counted(8)
        victims = cycle(("kubelet", "agent"))
        for first in range(0, PODS, BETWEEN_SETTLED):
            killer = group.create_task(fates.kill(next(victims)))
            try:
                await fates.play(first, min(BETWEEN_SETTLED, PODS - first))
            finally:
                killer.cancel()
                with suppress(asyncio.CancelledError):
                    await killer
            await fates.settle()
        assert len(fates.had) == PODS
        assert all(fates.kills[program] for program in ("agent", "kubelet"))
        for name in list(fates.node.vgpus):
            fates.node.end(name)
        await fates.settle()
        await fates.node.until_counted(T4_8Q, 8)
        await agent.kill()
