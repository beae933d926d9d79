"""Kubernetes' scheduler as an image, for the chart's second scheduler."""

import io
import tarfile
from pathlib import Path

from lab.cluster.cluster import Cluster
from lab.cluster.images import PREFIX, busybox, write_archive


def import_kube_scheduler(cluster: Cluster, tag: str) -> str:
    """Load Kubernetes' scheduler as an image; return its repository."""
    layer = io.BytesIO(busybox(Path("/bin/busybox")))
    with tarfile.open(fileobj=layer, mode="a") as tar:
        tar.add(cluster.binaries / "kube-scheduler", "bin/kube-scheduler")
    archive = cluster.folder / "kube-scheduler.tar"
    write_archive(archive, f"{PREFIX}/kube-scheduler:{tag}", layer.getvalue(), ())
    cluster.import_image(archive)
    return f"{PREFIX}/kube-scheduler"
