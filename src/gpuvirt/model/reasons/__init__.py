"""The one catalogue of reasons: every code with its meaning, and the wording of every reason.

A device that is not offered, a refused Allocate, an unhealthy vGPU: each has a `Reason`, never a log line alone, with
the same code on the command line, in the pod's status, in metrics, in the GpuNode and in the log. Messages are calls
and not templates: a missing field of a template would show only when the reason is needed, while mypy checks a call.
The evidence is a list of places (path and value), so output parses no text; only the kubelet's message about a pod is
parsed, which is all that the kubelet reports. A fix is for this host, such as its boot loader; where gpuvirt does not
recognize it, the fix is words and not a wrong command.
"""

from gpuvirt.model.reasons.findingcodes import FindingCode
from gpuvirt.model.reasons.reason import (
    ALSO,
    Link,
    Reason,
    Seen,
    code_in,
    count_of,
    grouped_text,
    joined,
    reasons_in,
    reasons_text,
    with_code,
    without_code,
)
from gpuvirt.model.reasons.reasoncodes import ReasonCode

__all__ = [
    "ALSO",
    "FindingCode",
    "Link",
    "Reason",
    "ReasonCode",
    "Seen",
    "code_in",
    "count_of",
    "grouped_text",
    "joined",
    "reasons_in",
    "reasons_text",
    "with_code",
    "without_code",
]
