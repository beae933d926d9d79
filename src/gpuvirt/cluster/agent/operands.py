"""NVIDIA's operands on this node that must be away while its vGPUs change: their labels are set, their pods watched.

Contract: NVIDIA's vgpu-device-manager, which has its operator take them away by a value of their labels that the
operator's DaemonSets don't select, waits for their pods, and puts the labels back. A label that is not `true` (`false`,
not there, paused by somebody else) is left alone. Here the labels follow what is wanted at any moment, so that they are
put back after any crash, and after pods that did not go.
"""

from collections.abc import Iterable, Mapping

from gpuvirt.cluster.agent.nodekeys import Claim
from gpuvirt.cluster.client import Collection
from gpuvirt.cluster.keys import Keys
from gpuvirt.cluster.kinds.core import Pod
from gpuvirt.cluster.labels import AGENT, PAUSED_FOR_VGPUS, VALIDATOR, deploy_label
from gpuvirt.cluster.resources import Metadata, pods
from gpuvirt.model.desired.observed import OperandsObserved
from gpuvirt.node.loops.cell import Cell

RUNS = "true"
OPERAND_LABELS = deploy_label(AGENT), deploy_label(VALIDATOR)
"""The node selectors of NVIDIA's operands that must be away while vGPUs change."""
OPERAND_APPS = ("nvidia-sandbox-device-plugin-daemonset", "nvidia-sandbox-validator")
"""The value of `app` that the pods of the same operands have."""


def operand_keys(observed: Metadata, *, away: bool) -> Keys:
    """Return what the labels of operands are to be."""
    before, then = (RUNS, PAUSED_FOR_VGPUS) if away else (PAUSED_FOR_VGPUS, RUNS)
    return Keys({label: then for label in OPERAND_LABELS if observed.labels.get(label) == before})


def operand_pods(namespace: str, node: str) -> Collection[Pod]:
    """Return the operands' pods on a node."""
    return Collection(pods(namespace), Pod, on_node=node, labelled=f"app in ({','.join(OPERAND_APPS)})")


def operand_claim(away: Cell[bool]) -> Claim:
    """Return the claim that operands are away while that is wanted, and at no other time."""
    return Claim(lambda observed: operand_keys(observed, away=away.get()), away.telling)


def observed_of(labels: Mapping[str, str] | None, found: Iterable[Pod] | None) -> OperandsObserved | None:
    """Return what is known of the operands; None where one of both was not heard, or the node is not there."""
    if labels is None or found is None:
        return None
    desired = tuple(label for label in OPERAND_LABELS if labels.get(label) == RUNS)
    return OperandsObserved(desired, tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in found)))
