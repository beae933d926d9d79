"""The shared GPUs of one node: which are to be shared, which of them containers can get, and who keeps a share."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PodUid
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import NodeSharing, offered
from gpuvirt.model.shares.node.nvidiacdi import ContainerRuntime, NvidiaSpec
from gpuvirt.model.shares.node.records import KeptShare

NO_GPUS = NodeSharing({})


class ShareState(msgspec.Struct, frozen=True):
    """The shared GPUs of one node at one moment."""

    published: NodeSharing = NO_GPUS
    """The GPUs that are to be shared, by the agent's observations of the host."""
    runtime: str | None = None
    """The version of the container runtime, by the API server's client; None until it is known."""
    node: NodeSharing = NO_GPUS
    """The GPUs that containers can get: those that are to be shared, without those that CDI can't give."""
    withheld: tuple[Reason, ...] = ()
    """The reasons against the others."""
    kept: Mapping[PodUid, KeptShare] = msgspec.field(default_factory=dict)
    """The pods that the API server lacks or calls ended, and that keep their shares, with the reason."""

    def with_published(self, sharing: NodeSharing) -> "ShareState":
        """Return the state with the GPUs that are to be shared now.

        A GPU that is not to be shared any more gets no new share from now on, whether CDI specs can be read or not.
        More GPUs are given only once the specs were judged. New pods get the limits of now.
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

    def judged(self, specs: Sequence[NvidiaSpec], *, cdi_enabled: bool | None) -> "ShareState":
        """Return the state with the GPUs that containers can get, by NVIDIA's CDI specs and the runtime's setting."""
        runtime = ContainerRuntime(self.runtime, cdi_enabled) if self.runtime is not None else None
        node, withheld = offered(self.published, runtime, specs)
        return replace(self, node=node, withheld=withheld)

    def is_judged_as(self, other: "ShareState") -> bool:
        """Return whether both states are judged alike by the same specs and settings."""
        return (self.published, self.runtime) == (other.published, other.runtime)
