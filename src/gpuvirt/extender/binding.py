"""The verb bind: gives a pod its node and its GPUs in one write, or says why not.

A Binding's annotations are merged into the pod in the transaction that sets its node, and its UID and its version are
preconditions (Kubernetes, pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata): so a pod is bound with its
GPUs or not at all, and no right to patch pods is needed. The decision and the reservation are one turn of the event
loop, so that no other binding comes between them.
"""

from collections.abc import Callable

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.extender.fence import Fence
from gpuvirt.extender.filtering import NO_LIMITS
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.protocol import BindingArguments
from gpuvirt.extender.writes import CannotBindError, Write, Writes
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, NotFoundError
from gpuvirt.model.shares.demand import Demand
from gpuvirt.model.shares.placement import MOST_STEPS, Placement, Steps
from gpuvirt.model.shares.wording import requested_text, too_complex_text
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingPod, demand_of_pod, needs_limits
from gpuvirt.shares.sharing import Sharing

NOT_LEADING = "this replica of the extender does not lead, or not yet; kube-scheduler tries again"


class Binder:
    """Binds pods for as long as this process leads."""

    def __init__(
        self,
        client: Client,
        index: Index,
        sharing: Sharing,
        clock: Clock,
        may_write: Callable[[], bool],
        intervals: ExtenderIntervals = INTERVALS,
    ) -> None:
        self._index = index
        self._sharing = sharing
        self._clock = clock
        self._may_write = may_write
        """Whether this process has the lease at this moment."""
        self._intervals = intervals
        self.fence = Fence(client, index, clock, intervals)
        self.writes = Writes(client, index, self.fence, clock, may_write, intervals)
        self.is_fenced = False
        """Whether no binding of an earlier term, of this or another process, can overcommit a GPU any more."""

    async def begin_term(self) -> None:
        """Change each pod that an earlier leader may have sent a binding of; needs pods that were listed in this term.

        A binding that was sent in an earlier term has a version that its sender had read while it had the lease. That
        version is of a pod in this term's list, or older.
        """
        self.is_fenced = False
        await self.writes.begin_term()
        await self.fence.change_all(self._index.unbound_pods(), self._open)
        self._open()

    def _open(self) -> None:
        self.is_fenced = True

    def end_term(self) -> None:
        """Bind nothing until the next term has begun."""
        self.is_fenced = False

    async def bind(self, asked: BindingArguments) -> None:
        """Bind a pod to a node; raise CannotBindError."""
        pod = await self._observed(asked)
        write = self._decided(pod, asked.node)
        if write is not None:
            await self.writes.make(write)

    async def _observed(self, asked: BindingArguments) -> SharingPod:
        """Return the pod once it has been observed; raise CannotBindError."""
        deadline_s = self._clock.monotonic_s() + self._intervals.observe_s
        while (pod := self._index.pod(asked.namespace, asked.name)) is None or pod.uid != asked.uid:
            if self._clock.monotonic_s() >= deadline_s:
                raise CannotBindError(await self._why_unknown(asked))
            await self._clock.sleep(self._intervals.look_s)
        return pod

    async def _why_unknown(self, asked: BindingArguments) -> str:
        where = f"pod {asked.namespace}/{asked.name}"
        try:
            pod = await self.writes.read(asked.namespace, asked.name)
        except NotFoundError:
            return f"{where} is gone"
        except (ApiError, TimeoutError) as error:
            return f"{where} is not known here yet, and cannot be read: {str(error) or 'no answer in time'}"
        if pod.uid != asked.uid:
            return f"{where} has the UID {pod.uid}; expected {asked.uid}: the pod was replaced"
        if not pod.names(self._sharing.resource):
            return f"{where} requests no {self._sharing.resource}; kube-scheduler should bind it itself"
        return f"{where} is not known here yet; kube-scheduler will try again"

    def _decided(self, pod: SharingPod, node: NodeName) -> Write | None:
        """Return the binding to write, whose units are then reserved; None for a pod that is bound as desired.

        Raises CannotBindError. Nothing is awaited here: the usage does not change before the reservation.
        """
        if not self._may_write() or not self.is_fenced:
            raise CannotBindError(NOT_LEADING)
        if pod.spec.node_name == node:
            return None
        if (why := self.fence.why_withheld(pod.uid)) is not None:
            raise CannotBindError(f"pod {pod.where} is not bound: {why}")
        if pod.spec.node_name:
            raise CannotBindError(f"pod {pod.where} is bound to node {pod.spec.node_name} already, not to {node}")
        if self.writes.is_under_way(pod.uid, node):
            raise CannotBindError(f"pod {pod.where} is being bound to node {node}")
        sent = self._index.reserved(pod.uid, node)
        if sent is not None:
            # One of unknown outcome is sent again with the same GPUs; one that was made lacks its event only.
            return Write(pod, node, sent) if self.writes.is_unknown(pod.uid, node) else None
        demand = self._demand(pod, node)
        if not demand.containers:
            return Write(pod, node, Placement({}, {}))
        chosen = self._chosen(pod, node, demand)
        self._index.reserve(pod, node, chosen)
        return Write(pod, node, chosen)

    def _chosen(self, pod: SharingPod, node: NodeName, demand: Demand) -> Placement:
        """Return the GPUs that a pod gets: those of its granted place, where they are free; raise CannotBindError."""
        place, sharing = self._index.revoke(pod.uid), self._sharing
        usage = self._index.usage_for(pod, node)
        if place is not None and place.node == node and usage is not None:
            # A place is by the pod of a request, which a client may have made up: the GPUs must be of the pod itself.
            is_of_pod = demand_of_pod(place.pod, sharing.resource, sharing.whole) == demand
            if is_of_pod and all(units <= usage.free.get(gpu, 0) for gpu, units in place.chosen.used.items()):
                return place.chosen
        steps = Steps(MOST_STEPS)
        chosen = usage.place(demand, sharing.policy_of(pod), sharing.whole, steps) if usage is not None else None
        if chosen is None and steps.is_undecided:
            raise CannotBindError(f"pod {pod.where} is not bound to node {node}: {too_complex_text(demand)}")
        if chosen is None:
            largest = f"its largest free piece is {usage.largest}" if usage is not None else "it shares no GPUs"
            raise CannotBindError(
                f"pod {pod.where} does not fit on node {node}: {requested_text(demand)} of {sharing.resource}"
                f" requested, {largest}"
            )
        return chosen

    def _demand(self, pod: SharingPod, node: NodeName) -> Demand:
        """Return what a pod requests; raise CannotBindError where no node, or this one, can give it."""
        try:
            demand = demand_of_pod(pod, self._sharing.resource, self._sharing.whole)
            needs = needs_limits(pod, demand, self._sharing.whole)
        except GpuvirtError as error:
            raise CannotBindError(f"pod {pod.where}: {error}") from error
        if needs and node not in self._index.limiting:
            raise CannotBindError(f"pod {pod.where} is not bound to node {node}: {NO_LIMITS}")
        return demand
