"""The KubeVirts of a cluster, asked of its API server once."""

import asyncio
from pathlib import Path

from gpuvirt.cluster.client import Client
from gpuvirt.cluster.failures import NotFoundError
from gpuvirt.cluster.kubecontext import from_kubeconfig
from gpuvirt.cluster.resources import Resource
from gpuvirt.model.kubevirt import KubeVirt, parse

KUBEVIRTS = Resource("kubevirts", "kubevirt.io")


def ask_kubevirts(kubeconfig: Path, context: str = "") -> tuple[KubeVirt, ...]:
    """Return what a cluster has, nothing where KubeVirt is not installed; raise ConfigError, ApiError."""
    client = Client(from_kubeconfig(kubeconfig, context))
    try:
        text = asyncio.run(client.read(KUBEVIRTS))
    except NotFoundError:
        return ()
    return parse(text, where=f"{KUBEVIRTS.path} of the cluster in {kubeconfig}")
