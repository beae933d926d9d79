"""The base of the structs in gpuvirt's kinds, whose fields have camelCase names, and conditions (metav1.Condition)."""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt.model.reasons import with_code


class Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of the structs in gpuvirt's kinds."""

    keeps_unknown: ClassVar[bool] = False
    """Whether the API server keeps undeclared fields: those of another program, or of another version."""


class ReadCondition(Part, frozen=True, kw_only=True, gc=False):
    """A condition of the object without its time."""

    type: Annotated[str, Meta(description="The name of the condition: Ready.")]
    status: Annotated[str, Meta(pattern="^(True|False|Unknown)$", description="True, False or Unknown.")]
    reason: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="The code of the reason for the status, one word.",
        ),
    ]
    message: Annotated[str, Meta(description="The reason in words.")] = ""


class Condition(ReadCondition, frozen=True, kw_only=True):
    """A condition of the object, as in metav1.Condition."""

    last_transition_time: Annotated[str, Meta(description="When the status last changed (RFC 3339).")]
    observed_generation: Annotated[int, Meta(description="The generation of the spec that the condition is about.")] = 0

    @property
    def why(self) -> str:
        """The reason, followed by the message if there is one: `NodesNotReady: node node01: ...`."""
        return with_code(self.reason, self.message)
