"""The helm that tests install the chart with: one that the user gives, or one build of its Go module."""

import os
from pathlib import Path

from lab.cache import cache_root, digest, once, say
from lab.cluster import gomodule
from lab.cluster.binaries import GIVEN
from lab.cluster.golang import installed_go
from lab.cluster.gomodule import HELM


def helm() -> Path:
    """Return the helm command, and build it where there is none; raise BuildError."""
    return _given() or once(_built(), _build) / "helm"


def helm_lacks() -> str | None:
    """Return why helm is missing and is not built automatically; None where it exists, or a Go that can build it.

    Where all tests must run (`CI=true`), Go is downloaded, too.
    """
    available = _given() is not None or _built().exists() or installed_go() is not None
    return None if available or os.environ.get("CI") == "true" else "no helm, and no Go that builds it"


def _given() -> Path | None:
    folder = os.environ.get(GIVEN)
    command = Path(folder) / "helm" if folder else None
    return command if command is not None and command.exists() else None


def _built() -> Path:
    return cache_root() / f"helm-{HELM}-{digest(gomodule.RECIPE)}"


def _build(folder: Path) -> None:
    say(f"building helm {HELM}: 3 minutes on 2 cores, once; less than one minute after Kubernetes")
    gomodule.build(folder, "helm.sh/helm/v4/cmd/helm")
