"""Our manifests with our image: the agent in a pod, with only the rights and mounts of its manifest."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import pytest
import yaml
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

from gpuvirt.agent.store import agentstate
from gpuvirt.model.desired.observed import NodeRequest, Observed
from tests.cluster.clusterlab import LabNode, PodRequest, devices_of
from tests.cluster.labnamespace import PATIENCE_S

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent
A10 = "nvidia.com/GA102GL_A10"
SLEEP = "env | grep PCI_RESOURCE; sleep 1000"

Manifest = dict[str, object]


class DaemonSet:
    """A manifest of ours, applied with the lab's image and with the mounted host as its host."""

    def __init__(self, node: LabNode, file: str) -> None:
        self.node = node
        manifests = list(yaml.safe_load_all((ROOT / "deploy" / file).read_text()))
        self.manifests: list[Manifest] = [_adapted(manifest, node.host) for manifest in manifests]
        found = next(manifest["metadata"] for manifest in manifests if manifest["kind"] == "DaemonSet")
        self.namespace, self.name = found["namespace"], found["name"]

    def kubectl(self, *arguments: str) -> str:
        done = self.node.cluster.kubectl("--namespace", self.namespace, *arguments)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The logs of its pods."""
        files = Path("/var/log/pods").glob(f"{self.namespace}_{self.name}-*/agent/*.log")
        return "\n".join(file.read_text()[-3000:] for file in files)

    def until_rolled_out(self) -> None:
        """Wait until its pod is ready: registered with the kubelet."""
        self.kubectl("rollout", "status", "daemonset", self.name, f"--timeout={PATIENCE_S:g}s")

    def pod(self) -> str:
        return self.kubectl("get", "pods", "-o", "jsonpath={.items[0].metadata.name}")

    def __enter__(self) -> Self:
        for manifest in self.manifests:
            self.node.apply(manifest)
        self.until_rolled_out()
        return self

    def __exit__(self, *_: object) -> None:
        self.kubectl("delete", "daemonset", self.name, "--cascade=foreground", "--wait=true")
        if self.namespace != "kube-system":
            self.node.cluster.kubectl("delete", "namespace", self.namespace, "--wait=true")


def _adapted(manifest: Mapping[str, object], host: Path) -> Manifest:
    """Return a manifest with the lab's image, and with the mounted host as the agent's host."""
    text = yaml.safe_dump(dict(manifest)).replace("image: gpuvirt:0.1.0", f"image: {PREFIX}/{NAME}")
    adapted: Manifest = yaml.safe_load(text.replace("imagePullPolicy: IfNotPresent", "imagePullPolicy: Never"))
    if adapted["kind"] != "DaemonSet":
        return adapted
    pod = adapted["spec"]["template"]["spec"]  # type: ignore[index]
    (container,) = pod["containers"]
    container.setdefault("env", []).append({"name": "GPUVIRT_HOST_ROOT", "value": "/host"})
    container["volumeMounts"].append({"name": "host", "mountPath": "/host"})
    pod["volumes"].append({"name": "host", "hostPath": {"path": str(host)}})
    return adapted


@pytest.fixture(params=["node.yaml", "plugin-only.yaml"])
def daemon_set(node: LabNode, image: None, request: pytest.FixtureRequest) -> Iterator[DaemonSet]:  # noqa: ARG001
    with node.simulated_host("2xA10"), DaemonSet(node, request.param) as found:
        yield found


def test_pods_get_gpus_during_a_rolling_upgrade(daemon_set: DaemonSet) -> None:
    node = daemon_set.node
    node.until_allocatable(A10, 2)
    node.start("keeps", PodRequest({A10: 1}, SLEEP))
    node.until(lambda: node.status("keeps").phase == "Running", lambda: str(node.status("keeps")))
    mine = node.devices("keeps")
    before = daemon_set.pod()
    began = time.monotonic()  # noqa: TID251  said, not asserted
    daemon_set.kubectl("rollout", "restart", "daemonset", daemon_set.name)
    daemon_set.until_rolled_out()
    took = time.monotonic() - began  # noqa: TID251
    node.until(lambda: daemon_set.pod() != before, daemon_set.logs)
    node.until_allocatable(A10, 2)
    print(f"a rolling upgrade took {took:.1f} s")  # noqa: T201  for lab/cluster/README.md
    other = devices_of(node.run("other", PodRequest({A10: 1})))
    assert mine | other == {"0000:65:00.0", "0000:ca:00.0"}
    assert node.status("keeps").containerStatuses[0].restartCount == 0


def test_http_endpoints_of_the_agent_answer_in_its_pod(daemon_set: DaemonSet) -> None:
    daemon_set.node.until_allocatable(A10, 2)
    address = daemon_set.kubectl("get", "pods", "-o", "jsonpath={.items[0].status.podIP}")
    page = daemon_set.node.run("asks", PodRequest({}, f"wget -q -O - http://{address}:9410/metrics"))
    assert f'gpuvirt_resource_registered{{resource="{A10}",reason=""}} 1' in page


def test_an_agent_in_a_pod_follows_its_node_with_its_own_roles(node: LabNode, image: None) -> None:  # noqa: ARG001
    with node.simulated_host("2xA10") as host, DaemonSet(node, "node.yaml") as daemon_set:
        kept = host / "var/lib/gpuvirt/desired.json"

        def desired() -> NodeRequest | None:
            return agentstate.DESIRED.decode(kept.read_bytes()).value.vgpu if kept.exists() else None

        node.until(
            lambda: (
                desired()
                == NodeRequest(
                    Observed(None), Observed(None), Observed(None), Observed(None), enforcement=Observed(None)
                )
            ),
            daemon_set.logs,
        )
        node.kubectl("label", "node", "node01", "nvidia.com/vgpu.config=A10-4Q")
        node.until(
            lambda: (
                desired()
                == NodeRequest(
                    Observed("A10-4Q"), Observed(None), Observed(None), Observed(None), enforcement=Observed(None)
                )
            ),
            daemon_set.logs,
        )
