"""What the cluster wants of this node's vGPUs: the node's label and the ConfigMap, as the agent is to hear them."""

from collections.abc import Callable

from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.kinds.core import ConfigMap, Node
from gpuvirt.cluster.labels import CONFIG_LABEL, WORKLOAD_LABEL
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed

CONFIG_KEY = "config.yaml"
"""The entry of the ConfigMap that has the vGPU configs."""

Hear = Callable[[NodeRequest], None]
"""Takes what is desired of a node; what the request has not heard stays as it was."""


def request_of_node(node: Node | None) -> NodeRequest:
    """Return what a node's labels want.

    A node that is not there wants nothing else than before: it was deleted to be registered again, or is not registered
    yet, and its machines run. A label without a value is no label, as for NVIDIA's device manager.
    """
    if node is None:
        return NodeRequest()
    labels = node.metadata.labels
    config, workload = (labels.get(label) or None for label in (CONFIG_LABEL, WORKLOAD_LABEL))
    return NodeRequest(config=Observed(config), workload=Observed(workload))


def request_of_config_map(key: ObjectKey, config_map: ConfigMap | None) -> NodeRequest:
    """Return what a ConfigMap wants; None where it is not there."""
    if config_map is None:
        return NodeRequest(configs=Observed(None))
    text, where = config_map.data.get(CONFIG_KEY), f"ConfigMap {key.namespace}/{key.name}, key {CONFIG_KEY}"
    if text is None:
        return NodeRequest(configs=Observed(ConfigText("", where, tuple(sorted(config_map.data)))))
    return NodeRequest(configs=Observed(ConfigText(text, where)))


def observe_node(observe: Hear, key: ObjectKey) -> Callable[[Delta[Node]], None]:
    """Return what hands on news of a node."""
    return lambda delta: observe(request_of_node(delta.objects.get(key)))


def observe_config_map(observe: Hear, key: ObjectKey) -> Callable[[Delta[ConfigMap]], None]:
    """Return what hands on news of a ConfigMap."""
    return lambda delta: observe(request_of_config_map(key, delta.objects.get(key)))
