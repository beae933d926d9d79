"""The kwok that plays the kubelets of worker nodes, one process a node, so that a node can stand still as its VM does.

By the stages of its module nodes become Ready and renew their Leases, pods run, and those that are deleted end.
Source: https://kwok.sigs.k8s.io/docs/user/stages-configuration/.
"""

import json
from pathlib import Path

from lab.cache import cache_root, digest, once, say
from lab.cluster.golang import go, run

KWOK = "0.8.0"
STAGES = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
"""The folders of `kustomize/stage` whose stages it plays: with none it ends."""


def kwok() -> tuple[str, ...]:
    """Return kwok's command with its stages, and build it where it is missing; raises BuildError."""
    folder = once(cache_root() / f"kwok-{KWOK}-{digest(*STAGES)}", _build)
    return str(folder / "kwok"), f"--config={folder / 'stages.yaml'}"


def _build(folder: Path) -> None:
    say(f"building kwok {KWOK}: 2 minutes on 2 cores, once")
    # Its own module, with its own versions of Kubernetes' libraries: kwok is built with older ones than the lab's.
    package = f"sigs.k8s.io/kwok/cmd/kwok@v{KWOK}"
    run([go(), "install", "-trimpath", "-ldflags", "-s -w", package], folder, {"GOBIN": str(folder)})
    module = json.loads(run([go(), "mod", "download", "-json", f"sigs.k8s.io/kwok@v{KWOK}"], folder))["Dir"]
    folders = (Path(module) / "kustomize/stage" / stage for stage in STAGES)
    texts = [file.read_text() for found in folders for file in sorted(found.glob("*.yaml"))]
    (folder / "stages.yaml").write_text("---\n".join(text for text in texts if "kind: Stage\n" in text))
