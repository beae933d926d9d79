"""Where the Kubernetes commands and containerd come from: a folder that the user gives, or one build."""

import os
from pathlib import Path

from lab.cache import cache_root, digest, once, say
from lab.cluster import gomodule
from lab.cluster.golang import BuildError
from lab.cluster.gomodule import CONTAINERD, KUBERNETES

COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr")

GIVEN = "GPUVIRT_K8S_BIN"


def binaries() -> Path:
    """Return the folder that contains all commands, and build them where there is none; raise BuildError."""
    given = os.environ.get(GIVEN)
    if not given:
        recipe = digest(gomodule.RECIPE, *COMMANDS, *RUNTIME)
        return once(cache_root() / f"kubernetes-{KUBERNETES}-containerd-{CONTAINERD}-{recipe}", _build)
    missing = [name for name in (*COMMANDS, *RUNTIME) if not (Path(given) / name).exists()]
    if missing:
        raise BuildError(f"{GIVEN}={given} does not contain {', '.join(missing)}")
    return Path(given)


def _build(folder: Path) -> None:
    say(f"building Kubernetes {KUBERNETES} and containerd {CONTAINERD}: about 6 minutes on 2 cores, once")
    gomodule.build(
        folder,
        *(f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS),
        *(f"github.com/containerd/containerd/v2/cmd/{name}" for name in RUNTIME),
    )
