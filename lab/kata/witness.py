"""The witness: a program that finds a pod's device nodes as Kata's cold plug does, built from `witness/`.

Kata's own shim is in no package registry, and needs /dev/kvm. The library that reads CDI specs is that of Kata 4.1.0's
runtime in Go, at the version of its go.mod; the kubelet's API is asked by Kubernetes' own client.
"""

import os
from pathlib import Path

from lab.cache import cache_root, digest, once, say
from lab.cluster.golang import go, installed_go, run

SOURCE = Path(__file__).parent / "witness"


def witness() -> Path:
    """Return the program, and build it where there is none; raise BuildError."""
    return once(_built(), _build) / "witness"


def witness_lacks() -> str | None:
    """Return why the program is missing and is not built automatically; None where it exists, or a Go that can.

    Where all tests must run (`CI=true`), Go is downloaded, too.
    """
    available = _built().exists() or installed_go() is not None or os.environ.get("CI") == "true"
    return None if available else "no Go that builds the witness"


def _built() -> Path:
    texts = (file.read_text() for file in sorted(SOURCE.iterdir()))
    return cache_root() / f"kata-witness-{digest(*texts)}"


def _build(folder: Path) -> None:
    say("building the witness of Kata's cold plug: about a minute, once")
    # Without the repository's state, for which Go would need git, and trust in the folder's owner.
    run([go(), "build", "-trimpath", "-buildvcs=false", "-mod=readonly", "-o", f"{folder}/witness", "."], SOURCE)
