"""What the cluster wants of this node's vGPUs: the node's label and the ConfigMap, as the agent is to hear them."""

from collections.abc import Callable

from gpuvirt.cluster.kinds.core import ConfigMap, Node
from gpuvirt.cluster.labels import CONFIG_LABEL, WORKLOAD_LABEL
from gpuvirt.cluster.mirror import News
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.model.heard import ConfigText, Heard, NodeRequest

CONFIG_KEY = "config.yaml"
"""The entry of the ConfigMap that has the vGPU configs."""

Hear = Callable[[NodeRequest], None]
"""Takes what is desired of a node; what the request has not heard stays as it was."""


def wish_of_node(node: Node | None) -> NodeRequest:
    """Return what a node's labels want.

    A node that is not there wants nothing else than before: it was deleted to be registered anew, or is not registered
    yet, and its machines run. A label without a value is no label, as for NVIDIA's device manager.
    """
    if node is None:
        return NodeRequest()
    labels = node.metadata.labels
    config, workload = (labels.get(label) or None for label in (CONFIG_LABEL, WORKLOAD_LABEL))
    return NodeRequest(config=Heard(config), workload=Heard(workload))


def wish_of_config_map(key: ObjectKey, config_map: ConfigMap | None) -> NodeRequest:
    """Return what a ConfigMap wants; None where it is not there."""
    if config_map is None:
        return NodeRequest(configs=Heard(None))
    text, where = config_map.data.get(CONFIG_KEY), f"ConfigMap {key.namespace}/{key.name}, key {CONFIG_KEY}"
    if text is None:
        return NodeRequest(configs=Heard(ConfigText("", where, tuple(sorted(config_map.data)))))
    return NodeRequest(configs=Heard(ConfigText(text, where)))


def hear_node(hear: Hear, key: ObjectKey) -> Callable[[News[Node]], None]:
    """Return what hands on news of a node."""
    return lambda news: hear(wish_of_node(news.objects.get(key)))


def hear_config_map(hear: Hear, key: ObjectKey) -> Callable[[News[ConfigMap]], None]:
    """Return what hands on news of a ConfigMap."""
    return lambda news: hear(wish_of_config_map(key, news.objects.get(key)))
