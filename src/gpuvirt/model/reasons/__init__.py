"""The one catalogue of reasons: every code with its meaning, and the wording of every reason."""

from gpuvirt.model.reasons.findingcodes import FindingCode
from gpuvirt.model.reasons.reason import Reason, code_in, in_words
from gpuvirt.model.reasons.reasoncodes import ReasonCode

__all__ = ["FindingCode", "Reason", "ReasonCode", "code_in", "in_words"]
