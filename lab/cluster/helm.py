"""The helm that tests install the chart with: one that is given, or built once from its Go module."""

import os
from pathlib import Path

from lab.cache import cache_root, once
from lab.cluster.binaries import GIVEN
from lab.cluster.golang import go, of_this_machine, run, say

HELM = "4.3.1"


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
    return cache_root() / f"helm-{HELM}"


def _build(folder: Path) -> None:
    say(f"building helm {HELM}: some 3 minutes on 2 cores, once")
    major = HELM.partition(".")[0]
    module = f"helm.sh/helm/v{major}"
    stamp = f"-s -w -X {module}/internal/version.version=v{HELM}"
    command = [go(), "install", "-trimpath", "-ldflags", stamp, f"{module}/cmd/helm@v{HELM}"]
    run(command, folder, GOBIN=str(folder))
