"""The admission webhook as a process beside the lab's API server, with the chart's configuration of it."""

import http.client
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from lab.cluster import settings

from gpuvirt.clock import RealClock
from gpuvirt.plain import Plain
from tests.cluster.labnamespace import LabNamespace
from tests.deploy.chart.helmchart import Helm, Rendered, at, items
from tests.web.certificates import Authority

PORT, METRICS_PORT = 19443, 19444
NAME = "gpuvirt-webhook"
POLICY = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
CLASSES = (settings.EXEMPT, "kata-strict", "runc-like")
"""A class that is exempt from pod security, one that is not, and one that is none of Kata's."""
PATIENCE_S = 60.0
CLOCK = RealClock()
VALUES = (
    "webhook.enabled=true",
    "extender.enabled=true",
    "scheduler.enabled=true",
    f"webhook.config.classes.{settings.EXEMPT}.profile=hot-plug",
    "webhook.config.classes.kata-strict.profile=hot-plug",
    "webhook.config.classes.kata-strict.mdev=refuse",
)


def until(met: Callable[[], bool], seen: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    began_s = CLOCK.monotonic_s()
    while not met():
        assert CLOCK.monotonic_s() - began_s < within_s, seen()
        time.sleep(0.1)  # noqa: TID251  for programs outside


@dataclass(frozen=True, slots=True)
class Answer:
    """The API server's answer to a pod."""

    status: int
    body: Plain
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """Why the pod was refused."""
        return str(at(self.body, "message"))


class Pods:
    """A client that creates pods in a namespace over one connection."""

    def __init__(self, node: LabNamespace) -> None:
        place = node.cluster.place
        context = ssl.create_default_context(cafile=str(node.cluster.ca))
        self._path = f"/api/v1/namespaces/{node.namespace}/pods"
        self._connection = http.client.HTTPSConnection(place.address, place.port, timeout=60, context=context)

    def create(self, pod: Mapping[str, object], *, dry_run: bool = False) -> Answer:
        """Create a pod; with `dry_run`, only ask whether it would be admitted."""
        headers = {"Authorization": f"Bearer {settings.ADMIN_TOKEN}", "Content-Type": "application/json"}
        query = "?dryRun=All" if dry_run else ""
        self._connection.request("POST", f"{self._path}{query}", json.dumps(pod), headers)
        answer = self._connection.getresponse()
        warnings = tuple(answer.headers.get_all("Warning") or ())
        return Answer(answer.status, json.loads(answer.read()), warnings)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass
class WebhookLab:
    """The API server, and the webhook that it asks."""

    node: LabNamespace
    pods: Pods
    process: "subprocess.Popen[bytes]"
    log: Path

    def is_ready(self) -> bool:
        """Return whether the process answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/readyz", timeout=1) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait(20)


def pod(name: str, runtime_class: str | None, resource: str = "tencent.com/vgpu-492") -> Mapping[str, object]:
    """Return the document's pod: one container with a limit, and a RuntimeClass."""
    containers = [{"name": "main", "image": "main:1", "resources": {"limits": {resource: "1"}}}]
    spec = {"containers": containers} | ({"runtimeClassName": runtime_class} if runtime_class else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def configuration(rendered: Rendered, ca: bytes) -> Mapping[str, object]:
    """Return the chart's configuration for a webhook that is a process of this computer."""
    found = dict(rendered.one("MutatingWebhookConfiguration", NAME))
    client: Plain = {"url": f"https://127.0.0.1:{PORT}/mutate", "caBundle": b64encode(ca).decode()}
    entries = [entry for entry in items(found["webhooks"]) if isinstance(entry, dict)]
    return {**found, "webhooks": [{**entry, "clientConfig": client} for entry in entries]}


@contextmanager
def webhook_lab(node: LabNamespace, helm: Helm, folder: Path) -> Iterator[WebhookLab]:
    """Run the webhook with the chart's config, and have the API server ask it."""
    rendered = helm.template(*VALUES)
    authority = Authority(folder)
    pair = authority.server("webhook", alternatives="IP:127.0.0.1")
    config = folder / "config.yaml"
    config.write_text(str(at(rendered.one("ConfigMap", NAME), "data", "config.yaml")))
    command = [sys.executable, "-m", "gpuvirt", "webhook", "--config", str(config)]
    command += ["--listen", f"127.0.0.1:{PORT}", "--metrics-listen", f"127.0.0.1:{METRICS_PORT}"]
    command += ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    log = folder / "webhook.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    pods = Pods(node)
    lab = WebhookLab(node, pods, process, log)
    classes = [
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "runc"}
        for name in CLASSES
    ]
    try:
        until(lab.is_ready, log.read_text)
        node.cluster.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(classes))
        node.apply(configuration(rendered, authority.certificate.read_bytes()))
        for kind in POLICY:
            node.apply(rendered.one(kind, NAME))
        asked = pod("asked", settings.EXEMPT)
        # The API server takes a moment until it asks.
        until(lambda: bool(items(at(pods.create(asked, dry_run=True).body, "spec", "initContainers"))), log.read_text)
        yield lab
    finally:
        for kind in ("MutatingWebhookConfiguration", *POLICY):
            node.cluster.kubectl("delete", kind, NAME, "--ignore-not-found")
        node.cluster.kubectl("delete", "runtimeclass", *CLASSES, "--ignore-not-found")
        pods.close()
        lab.stop()
