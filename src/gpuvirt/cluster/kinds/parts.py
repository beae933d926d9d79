"""What our kinds are made of: parts with names as Kubernetes writes them, and conditions (metav1.Condition)."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta


class Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of all parts."""

    keeps_unknown: ClassVar[bool] = False
    """Whether the API server keeps fields that are not declared: those of another program, or of another version."""


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
