"""An admin who has KubeVirt in the lab's cluster and changes it by hand."""

import json
from collections.abc import Mapping

from tests.cluster.controllerlab import ControlledNode


class Admin:
    """An admin who has KubeVirt and changes it by hand."""

    def __init__(self, cluster: ControlledNode) -> None:
        self.cluster = cluster
        self.node = cluster.node

    def make(self, configuration: Mapping[str, object]) -> None:
        """Create a KubeVirt of a version that has all fields."""
        metadata = {"name": "kubevirt", "namespace": self.node.namespace}
        kind = {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": metadata}
        self.node.apply({**kind, "spec": {"configuration": configuration}})
        status = '{"status": {"observedKubeVirtVersion": "v1.8.2"}}'
        self.node.kubectl("patch", "kubevirt", "kubevirt", "--subresource=status", "--type=merge", "-p", status)

    def configuration(self) -> Mapping[str, object]:
        reported = self.node.kubectl("get", "kubevirt", "kubevirt", "-o", "jsonpath={.spec.configuration}")
        found: Mapping[str, object] = json.loads(reported or "{}")
        return found

    def permitted(self) -> Mapping[str, tuple[str, bool]]:
        """Return the permitted resources with their selectors, and whether they have an external provider."""
        lists = self.configuration().get("permittedHostDevices") or {}
        assert isinstance(lists, dict)
        return {
            entry["resourceName"]: (entry["mdevNameSelector"], entry.get("externalResourceProvider", False))
            for entry in lists.get("mediatedDevices") or ()
        }

    def reported(self) -> str:
        """Return the policy's KubeVirt condition."""
        path = r'{range .status.conditions[?(@.type=="KubeVirtConfigured")]}{.status} {.reason} {.message}{end}'
        return self.node.kubectl("get", "clusterpolicy", "cluster-policy", "-o", f"jsonpath={path}")

    def until_reported(self, text: str) -> None:
        self.node.until(lambda: text in self.reported(), self.reported)
