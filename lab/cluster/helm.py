"""The helm that tests install the chart with: one that is given, or built once from its Go module."""

import os
from pathlib import Path

from lab.cache import cache_root, digest, once
from lab.cluster import gomodule
from lab.cluster.binaries import GIVEN
from lab.cluster.golang import of_this_machine, say
from lab.cluster.gomodule import HELM


def helm() -> Path:
    """Return the command, built where there is none; raises BuildError."""
    return _given() or once(_built(), _build) / "helm"


def helm_lacks() -> str | None:
    """Return why there is no helm and none is built unasked, None where there is one, or a Go that builds it.

    Where all must run (`CI=true`), a Go is fetched, too.
    """
    there = _given() is not None or _built().exists() or of_this_machine() is not None
    return None if there or os.environ.get("CI") == "true" else "no helm, and no Go that builds it"


def _given() -> Path | None:
    folder = os.environ.get(GIVEN)
    command = Path(folder) / "helm" if folder else None
    return command if command is not None and command.exists() else None


def _built() -> Path:
    return cache_root() / f"helm-{HELM}-{digest(gomodule.RECIPE)}"


def _build(folder: Path) -> None:
    say(f"building helm {HELM}: 3 minutes on 2 cores, once, and less than one after Kubernetes")
    gomodule.build(folder, "helm.sh/helm/v4/cmd/helm")
