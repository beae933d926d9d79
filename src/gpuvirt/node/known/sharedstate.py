"""The agent's state of shared GPUs: the devices of other plugins, and the units that follow from them.

Nothing here waits or changes the host.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.ledger import Consumer, Entry, KubeletAccount
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.settings import ShareSettings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.sharing import SharedOffer, ShareInputs, addresses_of, share_gpus
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.otherplugins import OtherPlugins, other_plugins
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import SharedGpu

NO_TIME = datetime.min.replace(tzinfo=UTC)
"""Stands for the time of an allocation; the records of shares have none."""


class GivenShares(Protocol):
    """The shares that pods have, and the GPUs that containers can get."""

    @property
    def records(self) -> ShareRecords:
        """The shares of all pods, with those that are being given."""
        ...

    def pods_by_gpu(self) -> Mapping[GpuId, tuple[str, ...]]:
        """Return the pods with shares of each GPU, as texts: `pod default/a`."""
        ...

    def kept_by_gpu(self) -> Mapping[GpuId, Units]:
        """Return the units that pods keep that the API server lacks or calls ended."""
        ...

    def why_withheld(self, gpu: GpuId) -> Reason | None:
        """Return why containers can't get a GPU that is to be shared; None if they can."""
        ...


class NoShares:
    """The shares of an agent that can't share GPUs."""

    records = ShareRecords()

    def pods_by_gpu(self) -> Mapping[GpuId, tuple[str, ...]]:
        """Return no pods."""
        return {}

    def kept_by_gpu(self) -> Mapping[GpuId, Units]:
        """Return no units."""
        return {}

    def why_withheld(self, gpu: GpuId) -> Reason | None:
        """Return no reason: without a plugin of units, no GPU is withheld by it."""
        del gpu
        return None


class SharedState:
    """The shared GPUs of one node."""

    def __init__(self, settings: ShareSettings) -> None:
        self._settings = settings
        self._given: GivenShares = NoShares()
        self._plugins: OtherPlugins | Unknown = Unknown()
        self.sharing = SharedOffer()
        """The units of each shared GPU, as last concluded from the host and the kubelet."""

    def follow(self, given: GivenShares) -> None:
        """Withhold what the container runtime can't give to containers, and know the shares that pods have."""
        self._given = given

    def pods_with_shares(self) -> Mapping[GpuId, tuple[str, ...]]:
        """Return the pods with shares of each GPU, as texts: `pod default/a`."""
        return self._given.pods_by_gpu()

    def observe_account(self, account: KubeletAccount | None) -> bool:
        """Take the kubelet's account, None if the kubelet did not answer; return whether other plugins' devices differ.

        An account that is missing or incomplete makes them unknown: another plugin may have registered since.
        """
        before = self._plugins
        self._plugins = other_plugins(account, ResourceName(self._settings.resource))
        return self._plugins != before

    def inputs(
        self, modes: Modes, former: FormerTenants, changing: Scope, blocked: Mapping[PciAddress, str]
    ) -> ShareInputs:
        """Return the inputs of shared GPUs; `changing` and `blocked` are those of changes under way."""
        return ShareInputs(modes, self._settings, self._plugins, former, changing, blocked)

    def conclude(self, inventory: Inventory, inputs: ShareInputs, now_s: float) -> None:
        """Conclude the units of each GPU in mode `shared`."""
        self.sharing = share_gpus(inventory, inputs, self.sharing.verdict, now_s)

    def entries(self, inventory: Inventory | None) -> tuple[Entry, ...]:
        """Return the GPUs of shares as allocations, for changes of GPUs; any thread calls it.

        A GPU whose UUID the driver does not show is left out. The kubelet's account has its units, which can't be
        mapped then.
        """
        records = self._given.records
        if not records.pods or inventory is None:
            return ()
        addresses = addresses_of(inventory)
        resource = ResourceName(self._settings.resource)
        return tuple(
            Entry(resource, DeviceId(gpu), Target(addresses[gpu]), None, f"share:{uid}", NO_TIME, consumer)
            for uid, pod in records.pods.items()
            for consumer in (Consumer(pod_uid=uid, namespace=pod.namespace, pod=pod.name),)
            for gpu in pod.placement.used
            if gpu in addresses
        )

    @property
    def shown(self) -> SharedOffer:
        """The units that pods can get: without GPUs that the container runtime can't give to a container."""
        gpus, kept = self.sharing.gpus, self._given.kept_by_gpu()
        shown = tuple(self._shown(gpu, kept) for gpu in gpus.gpus)
        recorded = tuple(sorted(self._given.pods_by_gpu()))
        return replace(self.sharing, gpus=replace(gpus, gpus=shown, recorded=recorded))

    def _shown(self, gpu: SharedGpu, kept: Mapping[GpuId, Units]) -> SharedGpu:
        if gpu.id is None:
            return gpu
        withheld = gpu.withheld if gpu.withheld is not None else self._given.why_withheld(gpu.id)
        return replace(gpu, withheld=withheld, kept=kept.get(gpu.id, Units(0)))
