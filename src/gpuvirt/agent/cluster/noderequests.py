"""The desired state in the node's labels and the vGPU ConfigMap, and the labels that report the progress toward it."""

from collections.abc import Callable

import msgspec

from gpuvirt import plain
from gpuvirt.agent.cluster.nodelabels import LabelClaim
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ConfigMap, Node
from gpuvirt.kube.labels import (
    CONFIG_LABEL,
    ENFORCEMENT_LABEL,
    REASON_ANNOTATION,
    STATE_LABEL,
    WORKLOAD_LABEL,
    WORKLOAD_REASON_ANNOTATION,
    WORKLOAD_STATE_LABEL,
    DesiredLabels,
)
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, Progress

CONFIG_KEY = "config.yaml"
"""The entry of the ConfigMap that has the vGPU configs."""

MOST_REASON = 1000
"""The most characters of a reason; all annotations of an object together may have 256 KiB."""

TakeRequest = Callable[[NodeRequest], None]
"""Stores the desired state of a node; parts that the request lacks stay as they are."""


def request_of_node(node: Node | None) -> NodeRequest:
    """Return the desired state in a node's labels.

    While the node object does not exist, the desired state stays as it is: the node was deleted to be registered again,
    or is not registered yet, and its VMs run. A label without a value counts as absent, as in NVIDIA's device manager.
    """
    if node is None:
        return NodeRequest()
    labels = node.metadata.labels
    config, workload, enforcement = (
        labels.get(label) or None for label in (CONFIG_LABEL, WORKLOAD_LABEL, ENFORCEMENT_LABEL)
    )
    return NodeRequest(config=Observed(config), workload=Observed(workload), enforcement=Observed(enforcement))


def request_of_config_map(key: ObjectKey, config_map: ConfigMap | None) -> NodeRequest:
    """Return the vGPU configs in a ConfigMap; None stands for a ConfigMap that does not exist."""
    if config_map is None:
        return NodeRequest(configs=Observed(None))
    text, where = config_map.data.get(CONFIG_KEY), f"ConfigMap {key.namespace}/{key.name}, key {CONFIG_KEY}"
    if text is None:
        return NodeRequest(configs=Observed(ConfigText("", where, tuple(sorted(config_map.data)))))
    return NodeRequest(configs=Observed(ConfigText(text, where)))


def observe_node(observe: TakeRequest, key: ObjectKey) -> Callable[[Delta[Node]], None]:
    """Return a function that passes changes of a node's labels to `observe`."""
    return lambda delta: observe(request_of_node(delta.objects.get(key)))


def observe_config_map(observe: TakeRequest, key: ObjectKey) -> Callable[[Delta[ConfigMap]], None]:
    """Return a function that passes changes of a ConfigMap to `observe`."""
    return lambda delta: observe(request_of_config_map(key, delta.objects.get(key)))


class StateLabel(msgspec.Struct, frozen=True):
    """The label of a state, and the annotation with its reason."""

    label: str
    annotation: str


OF_VGPUS = StateLabel(STATE_LABEL, REASON_ANNOTATION)
OF_WORKLOAD = StateLabel(WORKLOAD_STATE_LABEL, WORKLOAD_REASON_ANNOTATION)


def state_labels(state: Progress | None, state_label: StateLabel = OF_VGPUS) -> DesiredLabels:
    """Return the label and the annotation of a state; without a state, the node's stay as they are."""
    return (
        DesiredLabels(
            {state_label.label: state.name}, {state_label.annotation: plain.one_line(state.reason, MOST_REASON) or None}
        )
        if state is not None
        else DesiredLabels()
    )


def state_claim(states: Cell[Progress | None], state_label: StateLabel) -> LabelClaim:
    """Return the claim of the label and the annotation of a state."""
    return LabelClaim(lambda _: state_labels(states.get(), state_label), states.notifying)
