"""The decisions about shares: which GPUs containers can get, which pods keep a share, and whose shares end.

The API server alone is no proof that a pod has ended. A pod that is deleted with `--force`, or by the garbage
collection of pods, is gone there at once, while its containers run for their grace period or longer. The kubelet alone
is none, either: it frees the devices of such a pod as soon as it observes the deletion (`UpdateAllocatedDevices` counts
the pods that the API server has, Kubernetes 1.36). So the processes of the pod count, too, and two readings must lack
it.
"""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons.sharing import OF_NODE, driver_upgrade
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode, offered
from gpuvirt.model.shares.node.nvidiacdi import ContainerRuntime, NvidiaSpec
from gpuvirt.model.shares.node.records import KeptShare, ShareRecords, why_kept
from gpuvirt.model.shares.placement import GpuId

NO_GPUS = NodeSharing({})
NOT_OBSERVED = SharedOffer()


class CdiReading(msgspec.Struct, frozen=True):
    """One reading of NVIDIA's CDI specs, and of what is to limit shares."""

    specs: tuple[NvidiaSpec, ...]
    is_enabled: bool | None
    """The setting `enable_cdi` of the runtime's configuration; None where it is not set."""
    unlimited: Reason | None = None
    """Why no container with part of a GPU would start: what is to limit it is missing."""


class PodReading(msgspec.Struct, frozen=True):
    """One reading of the accounts of recorded pods that the API server lacks or calls ended."""

    gone: frozenset[PodUid] = frozenset()
    """These pods, by the API server's account, which is older than the other two."""
    in_kubelet: frozenset[PodUid] | Unknown = frozenset()
    """The pods in the kubelet's record."""
    running: frozenset[PodUid] | Unread = frozenset()
    """Those of `gone` that have processes on this host."""


NONE_GONE = PodReading()


class ObservedShares(msgspec.Struct, frozen=True):
    """The shares of one node as last observed. A reading counts once, with the decision that is made first after it."""

    records: ShareRecords = msgspec.field(default_factory=ShareRecords)
    """The shares of all pods, with those that are being given."""
    runtime: str | None = None
    """The version of the container runtime by the Node object, `containerd://2.1.3`; None until it is known."""
    upgrade: str = ""
    """The node's label by which its driver is being replaced; empty without one."""
    cdi: CdiReading | None = None
    accounts: PodReading = NONE_GONE


class ShareState(msgspec.Struct, frozen=True):
    """The decisions about shares at one moment."""

    published: NodeSharing = NO_GPUS
    """The GPUs that are to be shared, by the agent's observations of the host."""
    runtime: str | None = None
    """The version of the container runtime; None until it is known."""
    upgrade: Reason | None = None
    """Why no GPU gives units to more pods, while the node's driver is being replaced."""
    node: NodeSharing = NO_GPUS
    """The GPUs that containers can get: those that are to be shared, without those that CDI can't give."""
    withheld: tuple[Reason, ...] = ()
    """The reasons against the others."""
    kept: Mapping[PodUid, KeptShare] = msgspec.field(default_factory=dict)
    """The pods that the API server lacks or calls ended, and that keep their shares, with the reason."""
    lacking: frozenset[PodUid] = frozenset()
    """The pods that no account of the last reading has; the share of such a pod ends if the next one lacks it, too."""
    ended: frozenset[PodUid] = frozenset()
    """The pods whose shares end by the last two readings: their records and CDI specs are to be removed."""
    cdi: CdiReading | None = None
    accounts: PodReading = NONE_GONE

    def with_offer(self, offer: SharedOffer) -> "ShareState":
        """Return the state with the GPUs in mode `shared`; while they are not known, the offered units stay.

        What limits new pods counts at once, where it is known.
        """
        gpus = offer.gpus
        if gpus.enforcement is None:
            return self
        sharing = self.published
        if gpus.is_known:
            sharing = NodeSharing(gpus.capacity, whole=gpus.whole, minors=offer.minors)
        memory = {**sharing.memory_mib, **offer.memory_mib}
        return self.with_published(replace(sharing, memory_mib=memory, enforcement=gpus.enforcement))

    def with_published(self, sharing: NodeSharing) -> "ShareState":
        """Return the state with the GPUs that are to be shared now.

        A GPU that is not to be shared any more gets no new share from now on, whether CDI specs can be read or not.
        More GPUs are given only once the specs were read again. New pods get the limits of now.
        """
        if sharing == self.published:
            return self
        left = {gpu: min(units, sharing.capacity.get(gpu, Units(0))) for gpu, units in self.node.capacity.items()}
        node = replace(
            self.node,
            capacity={gpu: units for gpu, units in left.items() if units},
            memory_mib=sharing.memory_mib,
            enforcement=sharing.enforcement,
        )
        return replace(self, published=sharing, node=node)

    def with_cdi(self, reading: CdiReading) -> "ShareState":
        """Return the state with the GPUs that containers can get, by a new reading of NVIDIA's CDI specs."""
        runtime = ContainerRuntime(self.runtime, reading.is_enabled) if self.runtime is not None else None
        node, withheld = offered(self.published, runtime, reading.specs)
        return replace(self, node=node, withheld=withheld, cdi=reading).closed()

    def closed(self) -> "ShareState":
        """Return the state in which no GPU gives units to more pods while the driver is being replaced."""
        if self.upgrade is None or not self.published.capacity:
            return self
        return replace(self, node=replace(self.node, capacity={}), withheld=(self.upgrade,))

    def with_accounts(self, reading: PodReading) -> "ShareState":
        """Return the state with the pods that keep their shares, and those whose shares end, by a new reading."""
        kept = why_kept(reading.gone, reading.in_kubelet, reading.running)
        lacking = reading.gone - kept.keys()
        return replace(self, kept=kept, lacking=lacking, ended=lacking & self.lacking, accounts=reading)

    def is_judged_as(self, other: "ShareState") -> bool:
        """Return whether the same GPUs follow from the same CDI specs and settings for both states."""
        mine, theirs = ((state.published, state.runtime, state.upgrade is None) for state in (self, other))
        return mine == theirs

    @property
    def closed_by(self) -> Reason | None:
        """Why no GPU of the node gives units to more pods; None where that is a matter of each GPU."""
        return next((reason for reason in self.withheld if reason.subject in OF_NODE), None)

    @property
    def problem(self) -> Reason | None:
        """Why GPUs are not given to more pods, or only whole."""
        return next(iter(self.withheld), self.cdi.unlimited if self.cdi is not None else None)

    def kept_texts(self, records: ShareRecords) -> Mapping[str, str]:
        """Return why pods keep their shares, by pod as text: `pod default/a`."""
        named = ((records.pods[uid], kept) for uid, kept in self.kept.items() if uid in records.pods)
        return {f"pod {pod.namespace}/{pod.name}": kept.text for pod, kept in named}

    def kept_by_gpu(self, records: ShareRecords) -> Mapping[GpuId, Units]:
        """Return the units that pods keep that the API server lacks or calls ended, of each GPU.

        A pod that only the kubelet's record still has does not count: the kubelet writes its record again soon, and
        the scheduler need not know.
        """
        pods, units_by_gpu = records.pods, dict[GpuId, Units]()
        for uid in (uid for uid, why in self.kept.items() if uid in pods and why is not KeptShare.RECORDED):
            for gpu, units in pods[uid].placement.used.items():
                units_by_gpu[gpu] = Units(units_by_gpu.get(gpu, 0) + units)
        return units_by_gpu

    def why_withheld(self, gpu: GpuId) -> Reason | None:
        """Return why containers can't get a GPU that is to be shared, None if they can."""
        if gpu in self.node.capacity:
            return None
        return next((reason for reason in self.withheld if reason.subject in OF_NODE | {gpu}), None)


def decide_shares(observed: ObservedShares, before: ShareState, offer: SharedOffer = NOT_OBSERVED) -> ShareState:
    """Decide about the shares of a node; `offer` are its GPUs in mode `shared`."""
    sharers = [f"{pod.namespace}/{pod.name}" for pod in observed.records.pods.values()] if observed.upgrade else ()
    upgrade = driver_upgrade(observed.upgrade, sharers) if observed.upgrade else None
    state = replace(before, runtime=observed.runtime, upgrade=upgrade).with_offer(offer)
    if observed.cdi is not None and observed.cdi is not before.cdi:
        state = state.with_cdi(observed.cdi)
    if observed.accounts is not before.accounts:
        state = state.with_accounts(observed.accounts)
    return state.closed()


def with_shares(offer: SharedOffer, observed: ObservedShares | None, state: ShareState) -> SharedOffer:
    """Return the shared GPUs without those that the container runtime can't assign, with the pods' shares.

    `observed` is None for an agent that can't share GPUs: it withholds none by itself.
    """
    if observed is None:
        return offer
    kept = state.kept_by_gpu(observed.records)
    gpus = tuple(
        replace(gpu, withheld=gpu.withheld or state.why_withheld(gpu.id), kept=kept.get(gpu.id, Units(0)))
        if gpu.id is not None
        else gpu
        for gpu in offer.gpus.gpus
    )
    return replace(offer, gpus=replace(offer.gpus, gpus=gpus, recorded=tuple(sorted(observed.records.pods_by_gpu))))


def gone_pods(records: ShareRecords, pods: Mapping[PodUid, PodOnNode] | None) -> frozenset[PodUid]:
    """Return the recorded pods that the API server lacks or calls ended; none before it has listed its pods."""
    return frozenset(uid for uid in records.pods if pods is not None and (uid not in pods or pods[uid].ended))
