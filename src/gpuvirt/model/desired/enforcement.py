"""The enforcement of new pods' shares on a node, by its GpuNode, label, or the agent's settings, in this precedence.

The agent reads the label itself, also under a controller: a GpuNode's spec without a value has no opinion.
"""

import msgspec

from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Enforcement, Settings

LABEL = "gpuvirt.io/shares.enforcement"
"""The label of a node with the enforcement of its shares."""
OF_SPEC = Source(Origin.GPU_NODE, "GpuNode $.spec.shares.enforcement")
OF_LABEL = Source(Origin.LABEL, f"label {LABEL}")
OF_SETTINGS = Source(Origin.SETTINGS, "settings $.shares.enforcement")


class DesiredEnforcement(msgspec.Struct, frozen=True):
    """The enforcement of new pods' shares, and the source that sets it."""

    value: Enforcement
    source: Source


def of_settings(settings: Settings) -> DesiredEnforcement:
    """Return the enforcement of a node without a label and without one in its GpuNode."""
    return DesiredEnforcement(settings.shares.enforcement, OF_SETTINGS)


def enforcement_of(request: NodeRequest, settings: Settings) -> DesiredEnforcement | InvalidDesired | None:
    """Return the enforcement of a node in a cluster; None: a place that may set it has not been observed yet.

    The caller decides whether a GpuNode that was not observed may set it.
    """
    spec = request.spec.value if request.spec is not None else None
    if spec is not None and spec.enforcement is not None:
        return _parsed(spec.enforcement, OF_SPEC, "without it, the label or the default applies")
    if request.enforcement is None:
        return None
    if request.enforcement.value is not None:
        return _parsed(request.enforcement.value, OF_LABEL, "without the label, the default applies")
    return of_settings(settings)


def _parsed(text: str, source: Source, without: str) -> DesiredEnforcement | InvalidDesired:
    if text in set(Enforcement):
        return DesiredEnforcement(Enforcement(text), source)
    problem = f"is {quoted(text)}, so the shares of new pods keep their limits as they are"
    return invalid(source, text, problem, expected="what limits shares", known=Enforcement, fix=without)
