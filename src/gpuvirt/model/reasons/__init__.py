"""The one catalogue of reasons: every code with its meaning, and the wording of every reason."""

from gpuvirt.model.reasons.findingcodes import FindingCode
from gpuvirt.model.reasons.reason import (
    Link,
    Reason,
    Seen,
    code_in,
    count_of,
    joined,
    reasons_text,
    with_code,
    without_code,
)
from gpuvirt.model.reasons.reasoncodes import ReasonCode

__all__ = [
    "FindingCode",
    "Link",
    "Reason",
    "ReasonCode",
    "Seen",
    "code_in",
    "count_of",
    "joined",
    "reasons_text",
    "with_code",
    "without_code",
]
