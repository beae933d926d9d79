"""The devices of a node's GPUs that pods have, by the ledger and the kubelet's account, for changes of GPUs."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.agent.change.gate.gaterecord import APART_S, AccountReading, with_reading
from gpuvirt.agent.change.steps.changes import pods_by_gpu
from gpuvirt.agent.known.state import NodeState
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.allocation.allocations import Allocations, Consumers, ReadRecorded, Unknown, any_consumer
from gpuvirt.model.allocation.containerstarts import had, waiting
from gpuvirt.model.allocation.ledger import KubeletAccount, allocations_of
from gpuvirt.model.allocation.podallocations import PodAllocations, map_allocations
from gpuvirt.model.change.state import Account
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals


class PodAccount:
    """The devices of one node's pods, by all device plugins."""

    def __init__(
        self,
        state: NodeState,
        recorded: ReadRecorded,
        with_gpus: Callable[[Consumers], Consumers] = lambda consumers: consumers,
    ) -> None:
        """`recorded` reads the kubelet's record of its allocations.

        `with_gpus` puts the GPUs of shares in place of their units; any thread calls it.
        """
        self._with_gpus = with_gpus
        self._state = state
        self._recorded = recorded
        self._readings: tuple[AccountReading, ...] = ()
        """The latest readings of the kubelet's accounts."""
        self.awaits_reading = False
        """Whether the kubelet's accounts must be read again before vGPUs of another device plugin may be removed."""
        self.awaits_record = False
        """Whether a change waits until the accounts must show an allocation by another process."""
        self._awaited_s = 0.0
        """The time that these accounts must reach."""

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Record an answer of the kubelet; an incomplete account does not count as a reading."""
        if account is not None and account.recorded and account.partial is None:
            new = AccountReading(account.at_s, frozenset(device for _, device in account.devices), account.settled_s)
            self._readings = with_reading(self._readings, new)
            self.awaits_record = self.awaits_record and new.settled_s <= self._awaited_s

    def why_unsettled(self, gpu: PciAddress, since_s: float) -> Reason | None:
        """Return why the kubelet may still admit pods by a GPU's vGPUs that will be removed, None if it does not.

        `since_s` is when the device plugin that offered them was gone.
        """
        self.awaits_reading = not self._was_read_twice_since(since_s)
        if self.awaits_reading:
            return refusals.allocations_unknown(gpu)
        return self._state.counted.why_unsettled(gpu)

    def _was_read_twice_since(self, since_s: float) -> bool:
        # The plugin's last answer is recorded only when the container has got all its devices, some of other plugins.
        later = [reading.at_s for reading in self._readings if reading.at_s >= since_s]
        return bool(later) and later[-1] - later[0] >= APART_S

    def pods(self) -> Allocations | Unknown:
        """Return the pods of each GPU; unknown until the kubelet has answered after the last withdrawal."""
        if (unknown := self._unknown) is not None:
            return unknown
        allocations, inventory = self._allocations, self._state.inventory
        found = {} if inventory is None else dict(allocations.by_gpu(inventory))
        for gpu, account in pods_by_gpu(had(self._state.ledger.entries, inventory)).items():
            found[gpu] = tuple(dict.fromkeys((*found.get(gpu, ()), *account)))
        return found

    @property
    def _unknown(self) -> Unknown | None:
        """Why pods may have unknown devices: the kubelet has not answered since, or its account is incomplete."""
        observed = self._state.ledger.account
        if observed is None or not self._state.counted.is_known:
            return Unknown()
        return Unknown(observed.partial) if observed.partial is not None else None

    @property
    def _allocations(self) -> PodAllocations:
        """The devices of pods by the kubelet's account, from the ids of all device plugins."""
        observed, inventory = self._state.ledger.account, self._state.inventory
        if observed is None or inventory is None:
            return PodAllocations()
        return self._mapped(inventory, observed.devices)

    def read(self) -> Account:
        """Return the devices of pods; unknown while pods may have devices that the ledger lacks."""
        inventory, allocations = self._state.inventory, self._allocations
        free = self._state.memory.withdrawal.vgpus - self._state.counted.vgpus
        offered = frozenset[VgpuId](inventory.vgpus if inventory is not None else ()) - free
        pods = self.pods() if inventory is not None else Unknown()
        return Account(pods, allocations, self._state.picture.holdings, offered)

    def inputs(self, *, offered: bool = True) -> Inputs:
        """Return the inputs of a change; without `offered`, as if no vGPU were offered to the kubelet."""
        account = self.read()
        if not offered:
            account = replace(account, offered=frozenset())
        readings = self._readings

        def late_readings() -> Sequence[AccountReading]:
            self._awaited_s, self.awaits_record = readings[-1].at_s if readings else 0.0, True
            return readings

        return Inputs(
            lambda _: account,
            self._state.ledger.type_names,
            require_reset=self._state.terms.settings.require_reset,
            grace_without_driver=self._state.terms.settings.grace_without_driver,
            driver_may_come=self._state.memory.desired.follows_cluster,
            readings=late_readings,
        )

    def newest(self, inventory: Inventory) -> PodAllocations:
        """Return the devices of pods in the kubelet's newest record, by all device plugins; any thread calls it."""
        recorded = self._recorded()
        if isinstance(recorded, Unknown):
            return PodAllocations(unknown=recorded.reason or refusals.allocations_unknown())
        return self._mapped(inventory, any_consumer(recorded))

    def _mapped(self, inventory: Inventory, consumers: Consumers) -> PodAllocations:
        """Return the devices of pods on a host, without the GPUs for which pods of an earlier boot wait."""
        without = waiting(self._state.ledger.entries, inventory)
        others = {key: consumer for key, consumer in consumers.items() if key not in without} if without else consumers
        return map_allocations(inventory, allocations_of(self._with_gpus(others)), rules=self._state.ledger.rules)
