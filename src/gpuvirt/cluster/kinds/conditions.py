"""Conditions, as all of Kubernetes' objects have them (metav1.Condition)."""

from typing import Annotated

from msgspec import Meta

from gpuvirt.cluster.kinds.parts import Part


class Condition(Part, frozen=True, kw_only=True):
    """A condition, as all of Kubernetes' objects have them (metav1.Condition)."""

    type: str
    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$")]
    reason: Annotated[str, Meta(pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: str = ""
    last_transition_time: Annotated[str, Meta(description="When the status last changed, RFC 3339.")]
    observed_generation: int = 0

    @property
    def why(self) -> str:
        """Its reason, with its message where it has one: `NodesNotReady: node node01: ...`."""
        return f"{self.reason}: {self.message}" if self.message else self.reason
