"""KubeVirt's kinds on the lab's API server."""

from functools import partial

from lab.cluster.kubevirtkinds import manifests

from tests.cluster.clusterlab import LabNode


def install(node: LabNode, source: str, *, all_kinds: bool = False) -> None:
    """Install KubeVirt's and HCO's kinds."""
    kinds = manifests(source, all_kinds=all_kinds)
    for text in kinds.values():
        done = node.cluster.kubectl("apply", "--server-side", "-f", "-", given=text)
        assert done.returncode == 0, done.stderr
    for name in kinds:
        node.until(partial(_is_served, node, name), lambda: "a kind is not served yet")


def _is_served(node: LabNode, name: str) -> bool:
    return node.cluster.kubectl("get", name).returncode == 0
