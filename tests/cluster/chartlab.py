"""Users of the chart on the lab's node: helm, kubectl, nodes without a kubelet, and a cleanup."""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from lab.cluster import demo
from lab.cluster.cluster import Cluster
from lab.cluster.helm import helm as built
from lab.cluster.images import PREFIX, busybox, write_archive
from lab.cluster.ourimage import NAME
from lab.cluster.settings import AUDITED

from tests.cluster.clusterlab import LabNode

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/chart"
NAMESPACE = AUDITED
IMAGE = f"{PREFIX}/{NAME}"
KINDS = {"clusterpolicies.nvidia.com", "gpunodes.gpuvirt.io", "vgpuschedules.gpuvirt.io"}
OTHERS_OBJECTS = ("apiservices", "certificatesigningrequests", "componentstatuses")
"""Kinds whose objects others make: one APIService a group of kinds, for instance."""
OURS = ("nvidia.com/", "gpuvirt.io/", "feature.")
"""How labels begin that tests, or what they install, set on nodes."""


class _Metadata(msgspec.Struct):
    labels: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Metadata


@dataclass(frozen=True, slots=True)
class Install:
    """A user with helm and kubectl."""

    cluster: Cluster
    helm: Path

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = self.cluster.kubectl(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, manifest: Mapping[str, object]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", given=json.dumps(manifest))

    def get(self, what: str, path: str) -> str:
        """Return a field of an object in the release's namespace, empty if it is absent."""
        return self.cluster.kubectl("get", what, "-n", NAMESPACE, "-o", f"jsonpath={{{path}}}").stdout

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run helm."""
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}  # noqa: TID251  helm's own
        command = [str(self.helm), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    @contextmanager
    def begun(self, *arguments: str) -> Iterator[None]:
        """Run helm meanwhile, and end it; whether it succeeds is not asked."""
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}  # noqa: TID251  helm's own
        command = [str(self.helm), *arguments]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                yield
            finally:
                running.kill()

    def must(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{done.stderr}\n{self.pods()}"
        return done.stdout

    def pods(self) -> str:
        """Describe the pods for a failed test."""
        logs = Path("/var/log/pods").glob(f"{NAMESPACE}_*/*/*.log")
        reported = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs)
        return self.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide").stdout + reported

    def install(self, *values: str) -> "subprocess.CompletedProcess[str]":
        """Install by the commands of the GPU Operator's guide, with the lab's image."""
        repository, _, tag = IMAGE.rpartition(":")
        image = (f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never")
        options = ["--wait", "--timeout=120s", "--generate-name", "-n", NAMESPACE, "--create-namespace"]
        return self.run("install", *options, str(CHART), *(f"--set={value}" for value in (*image, *values)))

    def installed(self, *values: str) -> str:
        """Install, and return the release's name."""
        before = self.releases()
        done = self.install(*values)
        assert done.returncode == 0, f"{done.stderr}\n{self.pods()}"
        (release,) = set(self.releases()).difference(before)
        return release

    def uninstall(self, release: str) -> None:
        self.must("uninstall", release, "-n", NAMESPACE, "--wait", "--timeout=200s")

    def releases(self) -> list[str]:
        """Return the names of all releases, failed ones too."""
        return self.must("list", "-n", NAMESPACE, "--short").split()

    def clear(self) -> None:
        """Delete all releases and all their objects, including pods."""
        if self.cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}") is None:
            return
        for release in self.releases():
            self.run("uninstall", release, "-n", NAMESPACE, "--no-hooks", "--wait")
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true")

    @contextmanager
    def simulated_host(self, node: LabNode, name: str) -> Iterator[None]:
        """Mount a host for the node; all releases are removed before the host is."""
        with node.simulated_host(name), node.nodes_kept():
            try:
                yield
            finally:
                self.clear()

    def cluster_wide(self) -> set[str]:
        """Return the names of all cluster-scoped objects."""
        kinds = self.kubectl("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").split()
        chosen = [kind for kind in kinds if not kind.startswith(OTHERS_OBJECTS)]
        return set(self.kubectl("get", ",".join(chosen), "-o", "name").split())

    def crd(self, name: str, path: str) -> str:
        return self.kubectl("get", "crd", name, "-o", f"jsonpath={{{path}}}")

    def labels(self, node: str) -> Mapping[str, str]:
        """Return the labels of a node that belong to gpuvirt, NVIDIA or NFD."""
        found = msgspec.json.decode(self.kubectl("get", "node", node, "-o", "json"), type=_Node)
        return {key: value for key, value in found.metadata.labels.items() if key.startswith(OURS)}

    @contextmanager
    def node_without_kubelet(self, name: str, labels: Mapping[str, str]) -> Iterator[None]:
        """Create a Node object without a kubelet: its pods are created and never start."""
        self.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        try:
            yield
        finally:
            self.kubectl("delete", "node", name, "--ignore-not-found")


def on_simulated_host(node: LabNode) -> Sequence[str]:
    """Return values that make agents use the mounted host as their host."""
    return demo.on_simulated_host(node.host)


@contextmanager
def chart_user(lab: Cluster) -> Iterator[Install]:
    """Give a cluster without gpuvirt, and remove all releases afterwards."""
    user = Install(lab, built())
    for manifest in ("node.yaml", "discover.yaml"):
        lab.kubectl("delete", "-f", str(ROOT / "deploy" / manifest), "--ignore-not-found", "--wait=true")
    user.clear()
    try:
        yield user
    finally:
        user.clear()


def older(name: str) -> str:
    """Return a kind of gpuvirt as of an older release: without printer columns."""
    manifest = yaml.safe_load((ROOT / "deploy" / name).read_text())
    manifest["metadata"].pop("labels")
    manifest["spec"]["versions"][0].pop("additionalPrinterColumns")
    return yaml.safe_dump(manifest)


def import_vgpu_manager(cluster: Cluster, tag: str) -> str:
    """Load an image that stands in for NVIDIA's vGPU manager and does nothing; return its repository."""
    layer = io.BytesIO(busybox(Path("/bin/busybox")))
    program = b"#!/bin/sh\nexec sleep 1000000\n"
    with tarfile.open(fileobj=layer, mode="a") as tar:
        entry = tarfile.TarInfo("bin/nvidia-driver")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
    archive = cluster.folder / "vgpu-manager.tar"
    write_archive(archive, f"{PREFIX}/vgpu-manager:{tag}", layer.getvalue(), ())
    cluster.import_image(archive)
    return PREFIX


@contextmanager
def no_log_left() -> Iterator[None]:
    """Remove `/dev/log` afterwards, which containerd creates for a pod that mounts it, if it did not exist."""
    log = Path("/dev/log")
    existing = log.exists()
    try:
        yield
    finally:
        if not existing and log.is_dir():
            log.rmdir()
