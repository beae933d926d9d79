"""The Go module of all the lab's programs: one set of versions, so that Go compiles each package once for all of them.

Kubernetes' own go.mod replaces its staging modules by folders of its own tree; this one names the published modules.
helm and containerd are the newest ones that use the same versions of those.
"""

import json
import re
import tempfile
from pathlib import Path

from lab.cache import cache_root, locked
from lab.cluster.golang import go, run

KUBERNETES = "1.36.3"
CONTAINERD = "2.3.7"
HELM = "4.2.4"

REQUIRED = {
    "k8s.io/kubernetes": KUBERNETES,
    "github.com/containerd/containerd/v2": CONTAINERD,
    "helm.sh/helm/v4": HELM,
}
RECIPE = Path(__file__).read_text()
"""The recipe of the built programs: another text, other programs."""


def build(folder: Path, *packages: str) -> None:
    """Build the commands of some packages into a folder; raises BuildError."""
    compiler = go()
    alone = cache_root() / "go-build-alone"
    alone.mkdir(exist_ok=True)
    # One build at a time: the second finds in Go's cache what the first has compiled.
    with locked(alone), tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as work:
        module = Path(work)
        (module / "go.mod").write_text(_go_mod(compiler, module))
        # Without `go mod tidy`, which fetches what the tests of all modules need, too.
        run([compiler, "build", "-mod=mod", "-trimpath", "-ldflags", _flags(), "-o", f"{folder}/", *packages], module)


def _go_mod(compiler: str, folder: Path) -> str:
    found = run([compiler, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}"], folder)
    upstream = Path(json.loads(found)["GoMod"]).read_text()
    language = next(line for line in upstream.splitlines() if line.startswith("go "))
    staging = re.findall(r"(k8s\.io/[a-z0-9-]+) => \./staging", upstream)
    minor_and_patch = KUBERNETES.partition(".")[2]
    required = "".join(f"\t{module} v{version}\n" for module, version in REQUIRED.items())
    replaced = "".join(f"\t{module} => {module} v0.{minor_and_patch}\n" for module in staging)
    return f"module lab\n\n{language}\n\nrequire (\n{required})\n\nreplace (\n{replaced})\n"


def _flags() -> str:
    """Return linker flags: no symbols, and the versions, since clients can't parse what an unstamped build says."""
    major, minor, _ = KUBERNETES.split(".")
    kubernetes = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X k8s.io/component-base/version.{name}={value}" for name, value in kubernetes.items()]
    return " ".join(("-s -w", *stamps, f"-X helm.sh/helm/v4/internal/version.version=v{HELM}"))
