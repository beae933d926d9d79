"""Watches the allocations of devices to pods: asks the kubelet's pod-resources API and reads its checkpoint.

A kubelet records a pod's devices when it admits the pod, and makes the pod's folder a moment later. One that is killed
in between and starts without the API server knows the pod by its checkpoint alone, makes no folder, and admits the pod
again once the API server answers. From then on it writes its checkpoint without pods that have ended. So the absence of
a pod's folder does not tell of its end before another kubelet has made one (`PodFolders`).

Source: pkg/kubelet/cm/devicemanager/manager.go of Kubernetes 1.36: UpdateAllocatedDevices removes no pod before all
sources are ready; devicesToAllocate leaves a pod the devices that the checkpoint has.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Protocol

from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet.checkpoint import allocations_unknown, gone, uids, with_answers, with_folder, without_gone
from gpuvirt.kubelet.claims import ClaimedDevice
from gpuvirt.kubelet.hostaccount import has_no_kubelet, running_text
from gpuvirt.kubelet.podresources import PodResources, PodResourcesUnknownError
from gpuvirt.kubelet.recordedallocations import CheckpointContent, Look, RecordedAllocations
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import Counted, KubeletAccount
from gpuvirt.model.reasons import Reason
from gpuvirt.node.loops.intervals import Intervals
from gpuvirt.paths import HostPath, KubeletPaths


class PodFolders:
    """The folders of pods, as one agent has seen them."""

    def __init__(self) -> None:
        self._admitted_by: dict[PodUid, str] = {}
        """The kubelet that may have admitted each pod of the checkpoint: the one of the reading before it was found."""
        self.made: frozenset[PodUid] = frozenset()
        """The pods of the last checkpoint whose folder was seen."""
        self._last: str | None = None
        """The kubelet of the last reading, None before the first."""

    def unmade(self, pods: AbstractSet[PodUid], with_folder: AbstractSet[PodUid], kubelet: str) -> frozenset[PodUid]:
        """Return the pods of a checkpoint that another kubelet may have admitted, and whose folder was never seen.

        `with_folder` has those of them that have a folder; it may leave out pods of `made`. `kubelet` distinguishes the
        running kubelet from those before. A pod that the agent finds at its start counts as one of the running kubelet.
        """
        admitting = self._last if self._last is not None else kubelet
        self._admitted_by = {uid: self._admitted_by.get(uid, admitting) for uid in pods}
        self.made = (self.made & pods) | (with_folder & pods)
        self._last = kubelet
        return frozenset(uid for uid, by in self._admitted_by.items() if by != kubelet and uid not in self.made)


class Listener(Protocol):
    """The part of the agent that uses the allocations."""

    @property
    def ask_kubelet(self) -> Signal:
        """Set after each allocation, and when devices are withdrawn."""
        ...

    @property
    def unsettled(self) -> bool:
        """Whether the devices that the kubelet counts differ from the offered devices, as last observed."""
        ...

    @property
    def hurried(self) -> Signal:
        """Set when an allocation begins to wait for the device of a pod that may have ended."""
        ...

    @property
    def hurries(self) -> bool:
        """Whether an allocation waits for such a device now."""
        ...

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Store the allocations of pods, None where they are unknown."""
        ...

    def report_problem(self, who: str, problem: Reason | None) -> None:
        """Store the current problem of a part, None where it has none."""
        ...


class AccountWatch:
    """Reads the allocations at intervals, and soon after each allocation.

    It combines both sources. The API leaves out init containers, and pods that the kubelet does not know yet (after a
    restart while the API server is unreachable). The checkpoint has pods that have ended until the kubelet writes it
    again, which it does when a plugin sends its list. A pod that the API does not list and that has no folder has
    ended, provided that the folders belong to this kubelet (`checkpoint.without_gone`): the pods that the kubelet does
    not know yet keep their folders, but those that never had one (`podfolders`).
    """

    def __init__(  # noqa: PLR0913  what it reads, and how
        self,
        paths: KubeletPaths,
        recorded: RecordedAllocations,
        kubelets: Callable[[], tuple[int, ...] | Unread],
        clock: Clock,
        intervals: Intervals,
        resend: Callable[[], None],
        *,
        lacks_api: bool = False,
    ) -> None:
        """`lacks_api`: the agent has no access to the pod-resources API, only to the checkpoint.

        `resend` makes the plugins send their lists again; `recorded` gets the pods that have ended.

        `kubelets` returns the pids of the running kubelets.
        """
        self._kubelets = kubelets
        self._paths = paths
        self._recorded = recorded
        self._clock = clock
        self._intervals = intervals
        self._resend = resend
        self._lacks_api = lacks_api
        self._api = PodResources(paths.pod_resources_socket, clock)
        self._in_doubt: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
        """The devices that only the checkpoint had when the plugins last sent their lists to have it rewritten."""
        self._missing: frozenset[PodUid] = frozenset()
        """The pods that seemed to have ended at the last reading. A pod that seems so twice has ended; a new pod may
        not have its folder yet."""
        self._folders = PodFolders()
        self._reports_counted = False
        """Whether the kubelet reports the devices that it counts, so that an answer that is too early can be
        recognised."""
        self._early = 0
        """The number of early readings since devices were last withdrawn."""

    async def run(self, listener: Listener) -> None:
        """Read the allocations until cancelled."""
        early = False
        try:
            while True:
                soon = await self.ask(listener) or early
                later_s = until_tick_s(self._clock.monotonic_s(), self._intervals.allocations_s)
                pause_s = self._intervals.allocations_after_allocation_s if soon else later_s
                early = False
                if await listener.ask_kubelet.wait_for(self._clock, pause_s):
                    pause_s = self._pause_s(listener)
                    # The early reading may miss a device that was also allocated to a pod.
                    early = pause_s < self._intervals.allocations_after_allocation_s
                    await listener.hurried.wait_for(self._clock, pause_s)
        finally:
            await self._api.close()

    def _pause_s(self, listener: Listener) -> float:
        """Return the pause before the next reading: the kubelet lists a pod a moment after it has allocated devices."""
        most_s = self._intervals.allocations_after_allocation_s
        if listener.hurries:
            return self._intervals.allocations_after_withdrawal_s
        if not (self._reports_counted and listener.unsettled):
            return most_s
        self._early += 1
        return min(self._intervals.allocations_after_withdrawal_s * 2.0 ** (self._early - 1), most_s)

    async def ask(self, listener: Listener) -> bool:
        """Read the allocations once; return whether another reading is useful soon."""
        at, at_s = self._clock.now(), self._clock.monotonic_s()
        # The checkpoint is read first, since a pod that is admitted after that has no folder yet.
        look = self._recorded.look()
        answer = await self._ask_api()
        self._recorded.observe_kubelet(exists=not has_no_kubelet(self._paths, self._kubelets()))
        self._recorded.settle(look, None if isinstance(answer, PodResourcesUnknownError) else answer)
        problems = ""
        if isinstance(answer, PodResourcesUnknownError) and not isinstance(look.checkpoint, CheckpointContent):
            problems = f"{answer}; {self._paths.checkpoint}: {look.checkpoint}" if self._recorded.has_kubelet else ""
            answer = answer if problems else {}
        partial = None if problems else self._partial(answer, look)
        in_api: Consumers = {} if isinstance(answer, PodResourcesUnknownError) else answer
        record = look.checkpoint if isinstance(look.checkpoint, CheckpointContent) else CheckpointContent()
        in_checkpoint = {**self._recorded.lost(), **_by_device(look.claims), **record.consumers}
        in_file = self._without_gone(in_checkpoint, in_api, look)
        recorded = isinstance(look.checkpoint, CheckpointContent) or self._recorded.why_unknown(look) is None
        if recorded:
            missing = gone(in_checkpoint, in_file)
            self._recorded.observe_ended(missing & self._missing)
            self._missing = missing
        counted = await self._counted(look.checkpoint)
        self._reports_counted = not isinstance(counted, Unread)
        devices = {**in_file, **with_answers(in_api, in_checkpoint)}
        several = record.of_several if recorded else None
        account = KubeletAccount(at, at_s, devices, counted, record.registered, recorded, partial, several)
        listener.observe_account(None if problems else account)
        if not listener.unsettled:
            self._early = 0
        listener.report_problem("holders", allocations_unknown(problems) if problems else partial)
        if isinstance(answer, PodResourcesUnknownError):
            return False
        if look.is_missing and self._recorded.history.is_seen:
            self._resend()  # the kubelet has its allocations in its memory, and writes them with each list
        return self._request_rewrite(frozenset(record.consumers.keys() & in_file.keys() - in_api.keys()))

    def _without_gone(self, in_checkpoint: Consumers, in_api: Consumers, look: Look) -> Consumers:
        """Return the allocations in the checkpoint without those of pods that have certainly ended."""
        in_file = without_gone(self._paths, in_checkpoint, in_api)
        pods = uids(in_checkpoint)
        unmade = self._folders.unmade(pods, with_folder(self._paths, pods - self._folders.made), look.kubelet_after)
        return {
            key: consumer for key, consumer in in_checkpoint.items() if key in in_file or consumer.pod_uid in unmade
        }

    def _partial(self, answer: Consumers | PodResourcesUnknownError, look: Look) -> Reason | None:
        """Return why the allocations may be incomplete, by the same rules as `hostaccount`.

        Of a kubelet that does not run, the record is enough. Of a kubelet that runs, both sources are needed: the
        checkpoint lacks claims (DRA) of kubelets without a record of them, the API lacks init containers.
        """
        if (unknown := self._recorded.why_unknown(look)) is not None:
            return unknown
        if not isinstance(answer, PodResourcesUnknownError):
            return None
        running = self._kubelets()
        # unknown: a kubelet may run
        return None if running == () else allocations_unknown(f"{running_text(running)}; {answer}")

    def _request_rewrite(self, in_doubt: frozenset[tuple[ResourceName, DeviceId]]) -> bool:
        """Make the kubelet write its checkpoint where that may have ended pods; return whether it has new ones."""
        delta = in_doubt - self._in_doubt
        self._in_doubt = in_doubt
        if in_doubt:
            # The kubelet writes its checkpoint after each list, and leaves out pods that have ended then (decision 11).
            self._resend()
        return bool(delta)

    async def _ask_api(self) -> Consumers | PodResourcesUnknownError:
        try:
            return await self._api.consumers()
        except PodResourcesUnknownError as unknown:
            return unknown

    async def _counted(self, record: CheckpointContent | OSError | DamagedError) -> Counted:
        """Return the devices that the kubelet counts, Unread while it may count any.

        A kubelet that does not run counts nothing, and nothing either when it has started, until plugins register. A
        kubelet before 1.23 has no such call, and an unprivileged plugin no access to it. The checkpoint has what the
        kubelet counts, at the latest after the next list.
        """
        try:
            return await self._api.allocatable()
        except PodResourcesUnknownError as error:
            if self._kubelets() == ():  # unknown: a kubelet may run, and count devices
                return frozenset()
            if (error.is_unimplemented or self._lacks_api) and isinstance(record, CheckpointContent):
                return frozenset((name, device) for name, devices in record.registered.items() for device in devices)
            return Unread(HostPath(str(self._paths.pod_resources_socket)), seen=str(error))


def _by_device(claims: tuple[ClaimedDevice, ...] | OSError | DamagedError) -> Consumers:
    return dict(claims) if isinstance(claims, tuple) else {}
