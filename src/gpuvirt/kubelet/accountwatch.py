"""Asking the kubelet which pods have which devices: by its API where we reach it, else from its checkpoint."""

import logging
from collections.abc import Callable
from typing import Protocol

from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.checkpoint import gone, without_gone
from gpuvirt.kubelet.hostaccount import has_no_kubelet, running_text
from gpuvirt.kubelet.podresources import Consumers, PodResources, PodResourcesUnknownError
from gpuvirt.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.reasons import Reason, Seen, refusals
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.paths import KubeletPaths

log = logging.getLogger(__name__)


class Listener(Protocol):
    """The agent, as far as it hears of holders."""

    @property
    def allocated(self) -> Signal:
        """Set after each allocation, and whenever devices were taken from what is offered."""
        ...

    @property
    def unsettled(self) -> bool:
        """Whether the kubelet was not yet heard to count what is offered now, and no more than that."""
        ...

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Take which pods have which devices, None for not having heard it."""
        ...

    def report_problem(self, who: str, problem: Reason | None) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...


class AccountWatch:
    """Asks now and then, and soon after each allocation.

    Both accounts count. The API leaves out what the kubelet does not know yet (it was restarted while the API server is
    away) and containers that only initialise a pod. The checkpoint has pods that ended, until the kubelet writes it
    again; it does when a plugin sends its list. A pod that the API does not name and that has no folder of the kubelet
    is gone, where these folders are seen to be this kubelet's: those of pods that it does not know yet stay.
    """

    def __init__(
        self,
        paths: KubeletPaths,
        recorded: RecordedAllocations,
        kubelets: Callable[[], tuple[int, ...] | Unread],
        clock: Clock,
        intervals: Intervals,
        resend: Callable[[], None],
    ) -> None:
        """`resend` has plugins send their lists once more; `recorded` is told which pods are gone.

        `kubelets` returns the pids of the kubelets that run.
        """
        self._kubelets = kubelets
        self._paths = paths
        self._recorded = recorded
        self._clock = clock
        self._intervals = intervals
        self._resend = resend
        self._api = PodResources(paths.pod_resources_socket)
        self._in_doubt: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
        """What the checkpoint alone had when lists were last sent for its sake."""
        self._missing: frozenset[PodUid] = frozenset()
        """The pods that were gone at the last question; twice is gone, once may be a pod without its folder yet."""
        self._tells_counted = False
        """Whether the kubelet tells what it counts, so that an answer that came too early shows as such."""
        self._early = 0
        """How often it was asked since devices were last taken from what is offered."""

    async def run(self, listener: Listener) -> None:
        """Ask for ever."""
        early = False
        try:
            while True:
                soon = await self.ask(listener) or early
                later_s = until_tick_s(self._clock.monotonic_s(), self._intervals.allocations_s)
                pause_s = self._intervals.allocations_after_allocation_s if soon else later_s
                early = False
                if await listener.allocated.wait_for(self._clock, pause_s):
                    pause_s = self._pause_s(listener)
                    early = (
                        pause_s < self._intervals.allocations_after_allocation_s
                    )  # a pod may have been given one as well
                    await self._clock.sleep(pause_s)
        finally:
            await self._api.close()

    def _pause_s(self, listener: Listener) -> float:
        """Return how long to wait before the kubelet is asked: it lists a pod a moment after it gave it devices."""
        most_s = self._intervals.allocations_after_allocation_s
        if not (self._tells_counted and listener.unsettled):
            return most_s
        self._early += 1
        return min(self._intervals.allocations_after_withdrawal_s * 2.0 ** (self._early - 1), most_s)

    async def ask(self, listener: Listener) -> bool:
        """Ask once; return whether it is worth asking again soon."""
        at = self._clock.now()
        written = self._written()  # first: a pod that is admitted after this has no folder yet
        told, problems = await self._told(), ""
        if isinstance(told, PodResourcesUnknownError) and isinstance(written, OSError | DamagedError):
            problems = f"{told}; {written}"
        if problems and has_no_kubelet(self._paths, self._kubelets()):
            written, told, problems = {}, {}, ""
        partial = None if problems else self._partial(told, written)
        in_api: Consumers = {} if isinstance(told, PodResourcesUnknownError) else told
        in_checkpoint: Consumers = {} if isinstance(written, OSError | DamagedError) else written
        in_file = without_gone(self._paths, in_checkpoint, in_api)
        if not isinstance(written, OSError | DamagedError):
            missing = gone(in_checkpoint, in_file)
            self._recorded.gone, self._missing = missing & self._missing, missing
        counted = await self._counted()
        self._tells_counted = counted is not None
        recorded = not isinstance(written, OSError | DamagedError)
        account = KubeletAccount(at, {**in_file, **in_api}, counted or frozenset(), recorded, partial)
        listener.observe_account(None if problems else account)
        if not listener.unsettled:
            self._early = 0
        listener.report_problem("holders", _unknown(problems) if problems else partial)
        if isinstance(told, PodResourcesUnknownError):
            return False
        return self._clear_up(frozenset(in_checkpoint.keys() - in_api.keys()))

    def _partial(
        self, told: Consumers | PodResourcesUnknownError, written: Consumers | OSError | DamagedError
    ) -> Reason | None:
        """Return why a half account may not be all that pods have, as a command would.

        A kubelet that does not run left its record. Of one that runs both must be heard: the record lacks claims (DRA),
        the API lacks containers that only initialise a pod.
        """
        if isinstance(written, OSError | DamagedError):
            return _unknown(str(written))
        if not isinstance(told, PodResourcesUnknownError):
            return None
        running = self._kubelets()
        return None if running == () else _unknown(f"{running_text(running)}; {told}")

    def _clear_up(self, in_doubt: frozenset[tuple[ResourceName, DeviceId]]) -> bool:
        """Have the checkpoint written again where it may have pods that ended; return whether it will be."""
        delta = in_doubt - self._in_doubt
        self._in_doubt = in_doubt
        if in_doubt:
            self._resend()
        return bool(delta)

    async def _told(self) -> Consumers | PodResourcesUnknownError:
        try:
            return await self._api.consumers()
        except PodResourcesUnknownError as unknown:
            return unknown

    async def _counted(self) -> frozenset[tuple[ResourceName, DeviceId]] | None:
        """Return what it counts, None where it does not tell: then its having been asked is all there is."""
        try:
            return await self._api.allocatable()
        except PodResourcesUnknownError:
            return None

    def _written(self) -> Consumers | OSError | DamagedError:
        try:
            return checkpoint.consumers(checkpoint.parse(self._paths.checkpoint.read_bytes()))
        except FileNotFoundError as error:
            # The kubelet writes it with its first plugin: where it runs and has not, no pod has any device.
            return {} if self._paths.registration_socket.exists() else error
        except (OSError, DamagedError) as error:
            return error


def _unknown(said: str) -> Reason:
    return refusals.allocations_unknown("a device of this host", Seen("", said))
