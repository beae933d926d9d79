"""The cluster with a real node: a control plane, containerd, a kubelet and kube-proxy, until pods can run."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from lab.cache import cache_root
from lab.cluster import footprint, images, leftovers, secondcomputer, settings
from lab.cluster.binaries import binaries
from lab.cluster.controlplane import CONTROL_PLANE, ClusterError, ControlPlane
from lab.cluster.places import REAL, SECOND

KUBELET_ROOT = Path("/var/lib/kubelet")
"""Not configurable, because device plugins expect the kubelet there."""


@dataclass(frozen=True)
class Cluster(ControlPlane):
    """One real node with its control plane; a computer has one."""

    clients: ClassVar[Sequence[str]] = ("kubelet", "proxy")
    programs: ClassVar[Sequence[str]] = ("kubelet", "containerd", "proxy", *CONTROL_PLANE)
    """In the order in which they are stopped."""

    def up_control_plane(self) -> None:
        """Start the API server and etcd without controllers; raise ClusterError."""
        if leftovers.another_kubelet(self.folder.parent):
            raise ClusterError("a kubelet already runs on this computer; the lab needs /var/lib/kubelet for itself")
        if leftovers.kubelet_of_its_own(self.folder):
            raise ClusterError("/var/lib/kubelet has files of a kubelet of this computer; the lab would overwrite them")
        self.down()
        settings.write_node(self.folder, self.place)
        footprint.note(self.folder)
        leftovers.make_kubelet_folder(self.folder)
        _share_mounts()
        self.start_control_plane()

    def up(self) -> None:
        """Start everything; raise ClusterError."""
        self.up_control_plane()
        self.start_controllers()
        self.start_containerd()
        self._import_images()
        self.start_node()

    @override
    def start_node(self) -> None:
        self.start_kubelet()
        self.until(self.node_is_ready, "kubelet")
        self.start("proxy", "kube-proxy", *_proxy(self.place.network))  # it waits up to 30 s for its node

    def down(self) -> None:
        """Stop everything, and remove what it has left."""
        kubelet, *others = self.programs
        self.stop(kubelet)
        leftovers.end_containers(self.containerd)
        for name in (*others, "hardware"):
            self.stop(name)
        created = footprint.noted(self.folder)
        leftovers.clear(self.folder, self.place)
        footprint.remove(created)

    def start_containerd(self) -> None:
        """Start containerd, and wait until it answers."""
        self.start("containerd", "containerd", "-c", "containerd.toml")
        self.until(lambda: self.containerd("version").returncode == 0, "containerd")

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        self.start("kubelet", "kubelet", *_kubelet(self.folder, self.place.address))

    def containerd(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ctr, in the namespace of the kubelet's containers."""
        command = [str(self.binaries / "ctr"), "-a", f"{self.folder}/containerd.sock", "-n", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def import_image(self, archive: Path) -> None:
        """Import an image on the node."""
        done = self.containerd("images", "import", str(archive))
        if done.returncode:
            raise ClusterError(f"{archive} can't be imported: {done.stderr}")

    def _import_images(self) -> None:
        layer = images.busybox(Path("/bin/busybox"))
        for name, command in (("pause:1", ["/bin/sleep", "1000000"]), ("box:1", ["/bin/sh", "-c"])):
            archive = self.folder / f"{name.partition(':')[0]}.tar"
            images.write_archive(archive, f"{images.PREFIX}/{name}", layer, command)
            self.import_image(archive)


def cluster() -> Cluster:
    """Return this computer's cluster with a real node, running or not; build the commands where they are missing."""
    place = SECOND if secondcomputer.is_this() else REAL
    return Cluster(cache_root() / place.folder, binaries(), place)


def _share_mounts() -> None:
    """Make mounts of the host visible in pods that request it, as systemd does at boot."""
    subprocess.run(["mount", "--make-rshared", "/"], check=True)


def _kubelet(folder: Path, address: str) -> Sequence[str]:
    return (
        f"--config={folder}/kubelet.yaml",
        "--kubeconfig=kubeconfig.node",
        f"--root-dir={KUBELET_ROOT}",
        f"--hostname-override={settings.NODE}",
        f"--node-ip={address}",  # otherwise that of the default route, and the second computer has none
        "--v=2",
    )


def _proxy(pods: str) -> Sequence[str]:
    return (
        "--kubeconfig=kubeconfig",
        "--proxy-mode=nftables",
        f"--hostname-override={settings.NODE}",
        f"--cluster-cidr={pods}",
        "--healthz-bind-address=127.0.0.1:10256",
        "--metrics-bind-address=127.0.0.1:10249",
        "--conntrack-max-per-core=0",
    )
