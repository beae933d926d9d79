"""The cluster of `make demo-cluster`: the lab's node on a simulated host, gpuvirt's chart, and KubeVirt's kinds.

It runs in the background until `make lab-down`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.cache import say
from lab.cluster import hardware, walk
from lab.cluster.cluster import Cluster
from lab.cluster.controlplane import READY_WITHIN_S, ClusterError
from lab.cluster.helm import helm
from lab.cluster.images import PREFIX
from lab.cluster.kubevirtkinds import SOURCES, manifests
from lab.cluster.ourimage import NAME, build_images
from lab.cluster.schedulerimage import import_kube_scheduler
from lab.cluster.settings import AUDITED, HOST, NODE

ROOT = Path(__file__).parent.parent.parent
NAMESPACE = AUDITED
RELEASE = "gpuvirt"
PRESENT = "feature.node.kubernetes.io/pci-10de.present=true"


def demo(lab: Cluster) -> str:
    """Start the cluster where it does not run yet; return what to type there.

    Raises ClusterError, ImageError and BuildError, and has then removed all that it had started.
    """
    manifests_of_pods = lab.folder / "demo"
    if lab.runs(hardware.NAME) and manifests_of_pods.exists():
        if ended := [name for name in lab.programs if not lab.runs(name)]:
            raise ClusterError(f"{', '.join(ended)} of the demo's cluster has ended; make lab-down removes the rest")
        say("the demo's cluster runs already")
    else:
        if lab.runs("apiserver"):
            raise ClusterError("a cluster of the lab runs already, for tests or by hand; make lab-down ends it")
        try:
            _start(lab)
        except BaseException:
            lab.down()
            raise
        walk.write_pods(manifests_of_pods)
    return walk.text(exports(lab), manifests_of_pods)


def exports(lab: Cluster) -> str:
    """Return the command by which a shell finds the cluster and its programs."""
    folders = (lab.binaries, helm().parent, Path(sys.executable).parent)
    return f"export KUBECONFIG={lab.kubeconfig} PATH={':'.join(map(str, folders))}:$PATH"


def _start(lab: Cluster) -> None:
    say("starting etcd, the API server, its controllers, kube-scheduler, containerd and the kubelet: 10 s")
    lab.up()
    say(f"mounting the simulated host {walk.HOST}")
    module = (sys.executable, "-m", "lab.cluster.hardware", str(lab.folder), walk.HOST)
    lab.start(hardware.NAME, "env", f"PYTHONPATH={ROOT}", *module)
    lab.until(lambda: "is the node's hardware" in _log(lab), hardware.NAME)
    say("building gpuvirt's images from the Dockerfile: less than a minute")
    for archive in build_images(ROOT, lab.folder).values():
        lab.import_image(archive)
    scheduler = import_kube_scheduler(lab, "v1")
    say("creating KubeVirt's kinds")
    _create_kubevirt(lab)
    say("installing gpuvirt's chart with helm")
    _kubectl(lab, "label", "node", NODE, PRESENT)
    _install(lab, scheduler)


def _log(lab: Cluster) -> str:
    return (lab.folder / "log" / f"{hardware.NAME}.log").read_text()


def _create_kubevirt(lab: Cluster) -> None:
    """Create KubeVirt's kinds, and its own object as KubeVirt's operator reports it; no operator and no VM run."""
    kinds = manifests(SOURCES[-1])
    for kind in kinds.values():
        _kubectl(lab, "apply", "--server-side", "-f", "-", given=kind)
    _kubectl(lab, "wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in kinds))
    _kubectl(lab, "create", "namespace", "kubevirt")
    spec: Mapping[str, object] = {"configuration": {"developerConfiguration": {"featureGates": []}}}
    kubevirt = {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": spec}
    named = ("kubevirt", "kubevirt", "-n", "kubevirt")
    deadline = time.monotonic() + READY_WITHIN_S
    while lab.kubectl("get", "kubevirts", "-n", "kubevirt").returncode:  # the kind is served soon
        if time.monotonic() > deadline:
            raise ClusterError("the API server does not serve KubeVirt's kind")
        time.sleep(0.1)
    _kubectl(lab, "apply", "-n", "kubevirt", "-f", "-", given=json.dumps(kubevirt))
    reported = json.dumps({"status": {"observedKubeVirtVersion": "v1.8.0"}})
    _kubectl(lab, "patch", *named, "--subresource=status", "--type=merge", "-p", reported)


def _install(lab: Cluster, scheduler: str) -> None:
    repository, _, tag = f"{PREFIX}/{NAME}".rpartition(":")
    values = (
        *(f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never"),
        *("nvidiaRegistry=", "sandboxWorkloads.enabled=true", "extender.enabled=true", "scheduler.enabled=true"),
        *(f"scheduler.image.repository={scheduler}", "scheduler.image.tag=v1", "scheduler.image.pullPolicy=Never"),
        *on_simulated_host(lab.folder / HOST),
    )
    options = ("-n", NAMESPACE, "--create-namespace", "--wait", "--timeout=180s")
    command = [str(helm()), "install", RELEASE, str(ROOT / "deploy/chart"), *options]
    environment = os.environ | {"KUBECONFIG": str(lab.kubeconfig)}
    sets = [f"--set={value}" for value in values]
    done = subprocess.run([*command, *sets], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pods = lab.kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide").stdout
        raise ClusterError(f"helm install: {done.stderr}\n{pods}")


def on_simulated_host(host: Path) -> Sequence[str]:
    """Return values of the chart that make agents use the mounted host as their host."""
    env = "sandboxDevicePlugin.env[0]"
    return (
        f"hostPaths.driverInstallDir={host}",
        f"{env}.name=GPUVIRT_HOST_ROOT",
        f"{env}.value=/run/nvidia/driver",
    )


def _kubectl(lab: Cluster, *arguments: str, given: str | None = None) -> None:
    done = lab.kubectl(*arguments, given=given)
    if done.returncode:
        raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr}")
