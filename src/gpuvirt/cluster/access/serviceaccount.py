"""The credentials that the kubelet mounts into a pod: those of its service account."""

from collections.abc import Mapping
from pathlib import Path

from gpuvirt.cluster.access.credentials import Credentials

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts what a pod needs (`kubernetes.io/serviceaccount` volumes)."""


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Credentials | None:
    """Return a pod's credentials, None where the process is in no pod or its pod has none.

    The address stands in KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit() or not (folder / "token").exists():
        return None
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = "default"
    return Credentials(host, int(port), namespace, ca=folder / "ca.crt", token=folder / "token")
