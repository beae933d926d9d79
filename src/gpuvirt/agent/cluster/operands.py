"""Stops NVIDIA's operands on this node while its vGPUs change: sets their labels and watches their pods.

Contract: NVIDIA's vgpu-device-manager. It sets the operands' labels to a value that their DaemonSets do not select,
waits until the pods are gone, and restores the labels. A label other than `true` (`false`, absent, paused by another
program) stays as it is. Here the labels follow the desired state at any moment, so that they are restored after a crash
of the agent too, and if the pods did not go.
"""

from collections.abc import Iterable, Mapping

from gpuvirt.agent.cluster.nodelabels import LabelClaim
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.kinds.core import Pod
from gpuvirt.kube.labels import AGENT, PAUSED_FOR_VGPUS, VALIDATOR, DesiredLabels, deploy_label
from gpuvirt.kube.resources import Metadata, pods
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import OperandsObserved

RUNS = "true"
OPERAND_LABELS = deploy_label(AGENT), deploy_label(VALIDATOR)
"""The node selectors of NVIDIA's operands that must not run while vGPUs change."""
OPERAND_APPS = ("nvidia-sandbox-device-plugin-daemonset", "nvidia-sandbox-validator")
"""The value of `app` that the pods of the same operands have."""


def operand_labels(observed: Metadata, *, away: bool) -> DesiredLabels:
    """Return the labels that stop the operands, or that start them again."""
    before, then = (RUNS, PAUSED_FOR_VGPUS) if away else (PAUSED_FOR_VGPUS, RUNS)
    return DesiredLabels({label: then for label in OPERAND_LABELS if observed.labels.get(label) == before})


def operand_pods(namespace: str, node: str) -> Collection[Pod]:
    """Return the collection of the operands' pods on a node."""
    return Collection(pods(namespace), Pod, on_node=node, labelled=f"app in ({','.join(OPERAND_APPS)})")


def operand_claim(away: Cell[bool]) -> LabelClaim:
    """Return the claim of the labels that stop the operands while `away` is true."""
    return LabelClaim(lambda observed: operand_labels(observed, away=away.get()), away.notifying)


def observed_of(labels: Mapping[str, str] | None, found: Iterable[Pod] | None) -> OperandsObserved | None:
    """Return the selected labels and the pods of the operands; None while labels or pods are unknown."""
    if labels is None or found is None:
        return None
    desired = tuple(label for label in OPERAND_LABELS if labels.get(label) == RUNS)
    return OperandsObserved(desired, tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in found)))
