"""Watches the allocations of devices to pods: asks the kubelet's pod-resources API and reads its checkpoint.

A kubelet has a pod's devices in its memory from the plugin's answer on, writes them when a plugin sends its list or the
container has all its devices, and makes the pod's folder after the admission, which waits for other plugins without a
deadline. One that is killed in between and starts without the API server knows the pod by its checkpoint alone, and
admits it again once the API server answers. So the absence of a folder that was never seen tells nothing: the kubelet
itself then writes its checkpoint without the pod, once it has ended.

Source: pkg/kubelet/cm/devicemanager/manager.go of Kubernetes 1.36: UpdateAllocatedDevices, which each call of List
makes, removes no pod before all sources are ready; devicesToAllocate leaves a pod the devices that the checkpoint has.
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

from gpuvirt.agent.known.nokubelet import KubeletTrace, running_text
from gpuvirt.agent.kubelet.checkpoint import allocations_unknown, gone, uids, with_answers, with_folder, without_gone
from gpuvirt.agent.kubelet.podresources import PodResources, PodResourcesUnknownError
from gpuvirt.agent.kubelet.recordedallocations import CheckpointContent, Look, RecordedAllocations, Version
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import UNSETTLED, Counted, KubeletAccount, SettledAt
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import HostPath, KubeletPaths


class WrittenLists:
    """The times up to which answers to Allocate are in the kubelet's record, unless it has dropped them.

    The answer is in the kubelet's memory once it has arrived, before other plugins have answered for the container. The
    kubelet writes what its memory has after each list of devices, which comes by the connection of the answers, after
    them; two such lists, since one that arrives with an answer may be taken before it.
    """

    def __init__(self) -> None:
        self._sent: tuple[float, Version | None] | None = None
        """When a list was sent that is not written yet, and the record's version before it."""
        self._last_s = UNSETTLED
        """When the last list was sent after which the record was written."""
        self.settled_s = UNSETTLED
        """The same of the list before it."""

    def observe(self, version: Version | None) -> None:
        """Record the version of the checkpoint that was read."""
        if self._sent is not None and version is not None and version != self._sent[1]:
            self.settled_s, self._last_s, self._sent = self._last_s, SettledAt(self._sent[0]), None

    def send(self, at_s: float, version: Version | None) -> bool:
        """Record that lists are sent now; return whether all earlier ones were written."""
        is_first = self._sent is None
        if self._sent is None:
            self._sent = at_s, version
        return is_first


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
    def awaits_record(self) -> bool:
        """Whether the kubelet has not named the pod of an allocation yet."""
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
    again, which it does when a plugin sends its list. A pod that the API does not list, and whose folder was seen and
    is gone, has ended, provided that the folders belong to this kubelet (`checkpoint.without_gone`): the pods that the
    kubelet does not know yet keep their folders.
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
        self._with_folder: frozenset[PodUid] = frozenset()
        """The pods of the last checkpoint whose folder was seen."""
        self._lists = WrittenLists()
        self._settled_s = UNSETTLED
        """The time before which the kubelet has recorded all allocations that it has."""
        self._last = "", -inf
        """The kubelet of the last reading, by its socket, and its time."""
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
        settled_s = self._settled_by(look, at_s)
        if isinstance(answer, PodResourcesUnknownError) and self._kubelets() == ():  # unknown: a kubelet may run
            # What it has not recorded by now is lost; this look may be from before.
            self._settled_s = max(self._settled_s, SettledAt(self._clock.monotonic_s()))
        self._recorded.observe_kubelet(self._kubelets)
        self._recorded.settle(look, None if isinstance(answer, PodResourcesUnknownError) else answer)
        problems = ""
        if isinstance(answer, PodResourcesUnknownError) and not isinstance(look.checkpoint, CheckpointContent):
            if isinstance(kubelet := self._recorded.kubelet, KubeletTrace):
                problems = f"{answer}; {self._paths.checkpoint}: {look.checkpoint}; {kubelet.seen}"
            answer = answer if problems else {}
        partial = None if problems else self._partial(answer, look)
        in_api: Consumers = {} if isinstance(answer, PodResourcesUnknownError) else answer
        record = look.checkpoint if isinstance(look.checkpoint, CheckpointContent) else CheckpointContent()
        in_claims: Consumers = dict(look.claims) if isinstance(look.claims, tuple) else {}
        in_checkpoint = {**self._recorded.lost(), **in_claims, **record.consumers}
        in_file = self._without_gone(in_checkpoint, in_api)
        recorded = isinstance(look.checkpoint, CheckpointContent) or self._recorded.why_unknown(look) is None
        if recorded:
            missing = gone(in_checkpoint, in_file)
            self._recorded.observe_ended(missing & self._missing)
            self._missing = missing
        counted = await self._counted(look.checkpoint)
        self._reports_counted = not isinstance(counted, Unread)
        devices = {**in_file, **with_answers(in_api, in_checkpoint)}
        several = record.of_several if recorded else None
        admitting = frozenset(
            key for key in in_file.keys() - in_api.keys() if in_file[key].pod_uid not in self._with_folder
        )
        account = KubeletAccount(
            at, at_s, devices, counted, record.registered, recorded, partial, several, admitting, settled_s
        )
        listener.observe_account(None if problems else account)
        if not listener.unsettled:
            self._early = 0
        listener.report_problem("holders", allocations_unknown(problems) if problems else partial)
        is_lost = look.is_missing and self._recorded.history.is_seen
        in_doubt = frozenset(record.consumers.keys() & in_file.keys() - in_api.keys())
        return self._request_rewrite(look, in_doubt, listener, is_lost=is_lost)

    def _settled_by(self, look: Look, at_s: float) -> SettledAt:
        """Return the time before which the kubelet has recorded all allocations that it has.

        `at_s` is before the look. A kubelet that has ended has lost the answers that it has not recorded, and admits
        these pods again. A starting one makes its socket again.
        """
        self._lists.observe(look.version)
        kubelet, last_s = self._last
        if look.kubelet_after:
            self._last = look.kubelet_after, at_s
        is_another = look.kubelet_before not in {"", kubelet} and kubelet != ""
        self._settled_s = max(self._settled_s, self._lists.settled_s, SettledAt(last_s) if is_another else UNSETTLED)
        return self._settled_s

    def _without_gone(self, in_checkpoint: Consumers, in_api: Consumers) -> Consumers:
        """Return the allocations in the checkpoint without those of pods that have certainly ended."""
        in_file, pods = without_gone(self._paths, in_checkpoint, in_api), uids(in_checkpoint)
        had_folder = self._with_folder & pods
        self._with_folder = had_folder | with_folder(self._paths, pods - had_folder)
        return {
            key: consumer
            for key, consumer in in_checkpoint.items()
            if key in in_file or consumer.pod_uid not in self._with_folder
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

    def _request_rewrite(
        self, look: Look, in_doubt: frozenset[tuple[ResourceName, DeviceId]], listener: Listener, *, is_lost: bool
    ) -> bool:
        """Make the kubelet write its checkpoint; return whether that may tell something new.

        The kubelet has its allocations in its memory, and writes them after each list, without pods that have ended.
        `in_doubt` are the devices that only the checkpoint has.
        """
        is_new = bool(in_doubt - self._in_doubt)
        self._in_doubt = in_doubt
        if listener.awaits_record:
            is_new = self._lists.send(self._clock.monotonic_s(), look.version) or is_new
        if listener.awaits_record or in_doubt or is_lost:
            self._resend()
        return is_new

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
                return frozenset()  # unknown: nothing, no kubelet runs that could count devices
            if (error.is_unimplemented or self._lacks_api) and isinstance(record, CheckpointContent):
                # unknown: nothing, the record has what the kubelet counts
                return frozenset((name, device) for name, devices in record.registered.items() for device in devices)
            return Unread(HostPath(str(self._paths.pod_resources_socket)), seen=str(error))
