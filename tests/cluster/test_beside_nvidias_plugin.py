"""`nvidia-k8s-vgpu-dm` in a pod on a real node, with the roles that NVIDIA's operator gives it, beside a plugin."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME, VGPU_DM
from lab.cluster.settings import NODE

from tests.cluster.clusterlab import LabNode, PodRequest

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

NAMESPACE = "gpu-operator"
PLUGIN, VALIDATOR = (f"nvidia.com/gpu.deploy.sandbox-{operand}" for operand in ("device-plugin", "validator"))
CONFIG = "nvidia.com/vgpu.config"
KEYS = (PLUGIN, VALIDATOR, CONFIG, f"{CONFIG}.state")
MANIFEST = """
apiVersion: v1
kind: Namespace
metadata: {name: gpu-operator}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: nvidia-vgpu-device-manager, namespace: gpu-operator}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: nvidia-vgpu-device-manager}
rules:
  - {apiGroups: [""], resources: [nodes], verbs: [get, list, watch, update]}
  - {apiGroups: [""], resources: [pods], verbs: [list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: nvidia-vgpu-device-manager}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: nvidia-vgpu-device-manager}
subjects: [{kind: ServiceAccount, name: nvidia-vgpu-device-manager, namespace: gpu-operator}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: nvidia-vgpu-device-manager, namespace: gpu-operator}
rules:
  - {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: nvidia-vgpu-device-manager, namespace: gpu-operator}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: nvidia-vgpu-device-manager}
subjects: [{kind: ServiceAccount, name: nvidia-vgpu-device-manager, namespace: gpu-operator}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: default-vgpu-devices-config, namespace: gpu-operator}
data:
  config.yaml: |
    version: v1
    vgpu-configs:
      default: [{devices: all, vgpu-devices: {A10-12Q: 2}}]
      A10-4Q: [{devices: all, vgpu-devices: {A10-4Q: 6}}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-vgpu-device-manager, namespace: gpu-operator}
spec:
  selector: {matchLabels: {app: nvidia-vgpu-device-manager}}
  template:
    metadata: {labels: {app: nvidia-vgpu-device-manager}}
    spec:
      serviceAccountName: nvidia-vgpu-device-manager
      terminationGracePeriodSeconds: 5
      containers:
        - name: manager
          image: $(manager)
          imagePullPolicy: Never
          securityContext: {privileged: true}
          env:
            - {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
            - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
            - {name: CONFIG_FILE, value: /vgpu-config/config.yaml}
            - {name: DEFAULT_VGPU_CONFIG, value: default}
            - {name: GPUVIRT_KUBELET_DIR, value: /var/lib/kubelet} # the simulated host has none
          volumeMounts:
            - {name: config, mountPath: /vgpu-config}
            - {name: host, mountPath: /host}
            - {name: kubelet, mountPath: /var/lib/kubelet}
      volumes:
        - {name: config, configMap: {name: default-vgpu-devices-config}}
        - {name: host, hostPath: {path: $(host)}}
        - {name: kubelet, hostPath: {path: /var/lib/kubelet}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-sandbox-device-plugin-daemonset, namespace: gpu-operator}
spec:
  selector: {matchLabels: {app: nvidia-sandbox-device-plugin-daemonset}}
  template:
    metadata: {labels: {app: nvidia-sandbox-device-plugin-daemonset}}
    spec:
      nodeSelector: {nvidia.com/gpu.deploy.sandbox-device-plugin: "true"}
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 5
      containers:
        - name: plugin
          image: $(plugin)
          imagePullPolicy: Never
          command: [nvidia-kubevirt-gpu-device-plugin]
          env: [{name: GPUVIRT_HOST_ROOT, value: /host}]
          volumeMounts:
            - {name: plugins, mountPath: /var/lib/kubelet/device-plugins}
            - {name: host, mountPath: /host}
      volumes:
        - {name: plugins, hostPath: {path: /var/lib/kubelet/device-plugins}}
        - {name: host, hostPath: {path: $(host)}}
"""


class Operated:
    """A node on which an operator's DaemonSets run."""

    def __init__(self, node: LabNode) -> None:
        self.node = node

    def labels(self, *keys: str) -> None:
        self.node.kubectl("label", "node", NODE, "--overwrite", *keys)

    def label(self, key: str) -> str:
        return self.node.node().metadata.labels.get(key, "")

    def plugin(self) -> str:
        pods = ("get", "pods", "--selector", "app=nvidia-sandbox-device-plugin-daemonset")
        return self.node.kubectl("--namespace", NAMESPACE, *pods, "-o", "jsonpath={.items[*].metadata.uid}")

    def reported(self) -> str:
        """Output for a failed test."""
        logs = self.node.cluster.kubectl("--namespace", NAMESPACE, "logs", "daemonset/nvidia-vgpu-device-manager")
        notes = self.node.kubectl("get", "node", NODE, "-o", "jsonpath={.metadata.annotations}")
        return f"{notes}\n{[(key, self.label(key)) for key in KEYS]}\n{self.plugin()}\n{logs.stdout}{logs.stderr}"

    def until(self, key: str, value: str) -> None:
        self.node.until(lambda: self.label(key) == value, self.reported)


@contextmanager
def operated(node: LabNode) -> Iterator[Operated]:
    found = Operated(node)
    with node.simulated_host("2xA10-sriov") as host:
        text = MANIFEST
        for word, value in {"manager": f"{PREFIX}/{VGPU_DM}", "plugin": f"{PREFIX}/{NAME}", "host": str(host)}.items():
            text = text.replace(f"$({word})", value)
        manifests = list(yaml.safe_load_all(text))
        try:
            for manifest in manifests:
                node.apply(manifest)
            found.labels(f"{PLUGIN}=true", f"{VALIDATOR}=true")
            yield found
        finally:
            found.labels(*(f"{key}-" for key in KEYS))
            node.kubectl("annotate", "node", NODE, "gpuvirt.io/vgpu.config.reason-")
            for manifest in reversed(manifests):
                name, kind = manifest["metadata"]["name"], manifest["kind"].lower()
                if kind in {"namespace", "clusterrole", "clusterrolebinding", "daemonset"}:
                    node.cluster.kubectl("--namespace", NAMESPACE, "delete", kind, name, "--wait=true")


def resource(name: str) -> str:
    return f"nvidia.com/NVIDIA_A10-{name}"


def test_a_label_changes_the_resources_of_nvidias_device_plugin(node: LabNode, image: None) -> None:  # noqa: ARG001
    with operated(node) as existing:
        existing.until(f"{CONFIG}.state", "success")
        existing.until(PLUGIN, "true")
        node.until_allocatable(resource("12Q"), 4)
        before = existing.plugin()
        node.make_nodes()
        node.start("keeps", PodRequest({resource("12Q"): 1}, "sleep 1000"))
        node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
        began = time.monotonic()  # noqa: TID251  said, not asserted
        existing.labels(f"{CONFIG}=A10-4Q")
        node.until(lambda: existing.label(PLUGIN) == "paused-for-vgpu-change", existing.reported)
        node.until_allocatable(resource("4Q"), 6)
        print(f"a label beside another's plugin took {time.monotonic() - began:.1f} s")  # noqa: T201, TID251
        assert existing.plugin() != before, "the plugin was stopped during the change"
        # The other GPU's vGPU was allocated a moment ago. Its change may come later, which stops the plugin once more.
        existing.until(f"{CONFIG}.state", "pending")
        existing.until(PLUGIN, "true")
        existing.until(VALIDATOR, "true")
        assert node.status("keeps").phase == "Running"
        node.delete("keeps")
        node.until_allocatable(resource("4Q"), 12)
        existing.until(f"{CONFIG}.state", "success")
        existing.until(PLUGIN, "true")
        node.make_nodes()
        node.run("other", PodRequest({resource("4Q"): 1}, "true"))
