"""What our kinds are made of: parts with names as Kubernetes writes them."""

from typing import ClassVar

import msgspec


class Part(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of all parts."""

    keeps_unknown: ClassVar[bool] = False
    """Whether the API server keeps fields that are not declared: those of another program, or of another version."""
