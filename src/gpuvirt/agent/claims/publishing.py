"""The GPUs of a node that schedulers may give to claims: which are published, and in which shapes.

A GPU is published once no device plugin's pod has or can get one of its unit, and is recorded before that: until its
slice is known to be gone, no device plugin offers it. What is read for the shapes comes by the worker of its own.
"""

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.claims.preparing import ClaimParts
from gpuvirt.agent.reconcile.podaccount import PodAccount
from gpuvirt.agent.store.persisted import NotWrittenError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.loops.serialworker import WorkerBlockedError
from gpuvirt.model.allocation.claims import PREPARED_SHAPES
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.dra.pool import ShapedGpu, Shapes
from gpuvirt.model.node.claims import publishable
from gpuvirt.model.reasons import Reason, claims

AGAIN_S = 60.0
"""How often the shapes of the same GPUs are found out again."""
READ_S = 30.0


class Shaped(msgspec.Struct, frozen=True):
    """The shapes of GPUs, as found out at one time."""

    desired: frozenset[PciAddress] = frozenset()
    at_s: float = 0.0
    gpus: tuple[ShapedGpu, ...] = ()
    problem: Reason | None = None
    """Why GPUs that are desired lack a shape."""


class Publishing:
    """The GPUs of one node for claims."""

    def __init__(self, parts: ClaimParts, account: PodAccount) -> None:
        self._parts, self._account = parts, account
        self._worker = parts.options.workers("shapes")
        self._last = Shaped()
        self.problem: Reason | None = None
        """Why the shapes are not known."""

    @property
    def in_use(self) -> bool:
        """Whether claims get GPUs of this node, or had."""
        ledger = self._parts.state.ledger
        return bool(self._parts.state.memory.claimed or ledger.claims or ledger.published)

    @property
    def published(self) -> frozenset[PciAddress]:
        """The GPUs of which a slice may have a device."""
        return self._parts.state.ledger.published

    @property
    def claimed(self) -> frozenset[PciAddress]:
        """The GPUs that claims have, or wait for."""
        return self._parts.state.ledger.of_claims

    async def shaped(self) -> Shaped | None:
        """Return the GPUs that may be published now, with their shapes; None while that is not known."""
        state, now_s = self._parts.state, self._parts.options.clock.monotonic_s()
        if (inventory := state.inventory) is None or not (state.ledger.is_observed and self._are_modes_known):
            return None
        modes, counted = state.memory.desired.modes, state.counted
        of_vgpus = {inventory.vgpus[vgpu].gpu for vgpu in counted.vgpus if vgpu in inventory.vgpus}
        desired = publishable(modes, state.ledger, inventory, of_vgpus.union(counted.functions))
        desired |= {gpu for gpu in self.published & inventory.gpus.keys() if modes.of(gpu) is DesiredMode.CLAIMS}
        if not desired:
            self._last = Shaped()
        elif desired != self._last.desired or now_s >= self._last.at_s + AGAIN_S:
            if isinstance(found := await self._found(desired), Reason):
                self.problem = found
                return None
            self._last, self.problem = replace(found, desired=desired, at_s=now_s), None
        return self._last

    @property
    def _are_modes_known(self) -> bool:
        """Whether the cluster's request for the modes of GPUs was observed, also before a restart."""
        request, terms = self._parts.state.picture.request, self._parts.state.terms
        if request is None or (terms.request.follows_spec and request.spec is None):
            return False
        has_label = not terms.settings.workload_label or request.workload is not None
        return has_label or (request.spec is not None and request.spec.value is not None)

    async def _found(self, desired: frozenset[PciAddress]) -> Shaped | Reason:
        change_host, inputs, names = self._parts.change_host, self._account.inputs(), self._parts.options.terms.ids

        def read() -> Shapes | Unread:
            from gpuvirt.agent.claims.shaping import read_shapes  # noqa: PLC0415  other agents do without

            return read_shapes(change_host, inputs, names)

        try:
            found = await self._worker.run(read, name="shapes of GPUs", timeout_s=READ_S)
        except (WorkerBlockedError, OSError) as error:
            return claims.not_published(claims.THE_GPUS, f"their shapes are not known: {error}")
        if isinstance(found, Unread):
            return claims.not_published(claims.THE_GPUS, f"the loaded driver is not known: {found.detail}")
        shaped, withheld = found
        gpus = (
            replace(gpu, shapes=tuple(shape for shape in gpu.shapes if shape in PREPARED_SHAPES))
            for gpu in shaped
            if gpu.address in desired
        )
        lacking = [left for left in withheld if left.gpu in desired and left.shape in PREPARED_SHAPES]
        problem = claims.without_shape(lacking[0].gpu, lacking[0].shape, lacking[0].why) if lacking else None
        return Shaped(gpus=tuple(gpu for gpu in gpus if gpu.shapes), problem=problem)

    async def record(self, gpus: frozenset[PciAddress]) -> None:
        """Record the published GPUs, and return when that would survive a power cut; raise NotWrittenError.

        After an error the record is the one from before.
        """
        parts, before = self._parts, self.published
        if gpus == before:
            return
        parts.state.record_published(gpus)
        try:
            await parts.write_ledger()
        except NotWrittenError:
            parts.state.record_published(before | gpus)
            raise
        parts.publish()
