"""The workload of the lab's node: its label, and what the agent reports of it."""

from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode

LABEL = "nvidia.com/gpu.workload.config"
STATE, REASON = "gpuvirt.io/gpu.workload.state", "gpuvirt.io/gpu.workload.reason"


def is_for(node: LabNode, value: str) -> None:
    node.kubectl("label", "node", NODE, f"{LABEL}={value}", "--overwrite")


def node_key(node: LabNode, kind: str, name: str) -> str:
    path = name.replace(".", r"\.")
    return node.kubectl("get", "node", NODE, "-o", f"jsonpath={{.metadata.{kind}.{path}}}")


def until(node: LabNode, state: str) -> None:
    node.until(lambda: node_key(node, "labels", STATE) == state, lambda: node_key(node, "annotations", REASON))
