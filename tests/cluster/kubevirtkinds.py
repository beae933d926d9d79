"""KubeVirt's kinds on the lab's API server."""

from lab.cluster.kubevirtkinds import manifests

from tests.cluster.labnamespace import LabNamespace


def install(node: LabNamespace, source: str, *, all_kinds: bool = False) -> None:
    """Install KubeVirt's and HCO's kinds."""
    kinds = manifests(source, all_kinds=all_kinds)
    done = node.cluster.kubectl("apply", "--server-side", "-f", "-", given="\n---\n".join(kinds.values()))
    assert done.returncode == 0, done.stderr
    listed = ("get", ",".join(kinds))
    node.until(lambda: node.cluster.kubectl(*listed).returncode == 0, lambda: node.cluster.kubectl(*listed).stderr)
