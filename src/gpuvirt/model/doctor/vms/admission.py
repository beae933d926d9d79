"""Finds gpuvirt's refusal in the kubelet's message on a pod that it did not admit."""

import re

from gpuvirt.model.reasons import Reason, Seen, code_in

_REFUSAL = re.compile(r"desc = \S+: (?P<code>[A-Z][A-Za-z]+): (?P<text>.*?)(?:, which is unexpected.*)?$", re.DOTALL)


def refusal_in(message: str) -> Reason | None:
    """Return the reason for which gpuvirt refused an Allocate, None where the message has no such reason."""
    found = _REFUSAL.search(message)
    code = code_in(found["code"]) if found is not None else None
    if found is None or code is None:
        return None
    text, _, fix = found["text"].partition("; fix: ")
    text, _, seen = text.partition("; seen: ")
    subject, _, words = text.partition(" ")
    return Reason(code, subject, words, (Seen("", seen),) if seen else (), fix or None)
