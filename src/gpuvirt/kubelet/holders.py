"""Asking the kubelet which pods have which devices: by its API where we reach it, else from its checkpoint."""

import logging
from collections.abc import Mapping
from typing import Protocol

from gpuvirt.clock import Clock, Signal
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.podresources import PodResources, PodResourcesUnheardError
from gpuvirt.model.ledger import Consumer, Holders
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node.pace import Pace
from gpuvirt.paths import KubeletPaths

log = logging.getLogger(__name__)


class Listener(Protocol):
    """The agent, as far as it hears of holders."""

    @property
    def allocated(self) -> Signal:
        """Set after each allocation."""
        ...

    def hear_holders(self, holders: Holders | None) -> None:
        """Take which pods have which devices, None for not having heard it."""
        ...

    def hear_trouble(self, who: str, trouble: Reason | None) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...


class HolderWatch:
    """Asks now and then, and soon after each allocation."""

    def __init__(self, paths: KubeletPaths, clock: Clock, pace: Pace) -> None:
        self._paths = paths
        self._clock = clock
        self._pace = pace
        self._api = PodResources(paths.pod_resources_socket)

    async def run(self, listener: Listener) -> None:
        """Ask for ever."""
        try:
            while True:
                await self.ask(listener)
                if await listener.allocated.wait_for(self._clock, self._pace.holders_s):
                    await self._clock.sleep(self._pace.holders_after_allocation_s)
        finally:
            await self._api.close()

    async def ask(self, listener: Listener) -> None:
        """Ask once."""
        at = self._clock.now()
        try:
            devices: Mapping[tuple[ResourceName, DeviceId], Consumer] = await self._api.holders()
        except PodResourcesUnheardError as unheard:
            try:
                devices = checkpoint.holders(checkpoint.parse(self._paths.checkpoint.read_bytes()))
            except (OSError, DamagedError) as error:
                listener.hear_holders(None)
                listener.hear_trouble("holders", _unheard(f"{unheard}; {error}"))
                return
        listener.hear_holders(Holders(at, devices))
        listener.hear_trouble("holders", None)


def _unheard(seen: str) -> Reason:
    return Reason(
        ReasonCode.HOLDERS_UNHEARD,
        "the kubelet",
        "can't be asked which pods have which devices; what it said last is taken to stand",
        seen=seen,
        fix="mount the kubelet's pod-resources folder, or its device-plugins folder readable for root",
    )
