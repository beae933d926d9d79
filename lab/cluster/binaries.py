"""Where the Kubernetes commands and containerd come from: a folder that is given, or built once from their Go modules.

Their go.mod replaces its staging modules by folders of its own tree, so ours names the published ones instead.
"""

import json
import os
import re
import tempfile
from pathlib import Path

from lab.cache import cache_root, once
from lab.cluster.golang import BuildError, go, run, say

KUBERNETES = "1.36.3"
CONTAINERD = "2.4.2"

COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr")

GIVEN = "GPUVIRT_K8S_BIN"


def binaries() -> Path:
    """Return the folder that has all commands; build them where there is none. Raises BuildError."""
    given = os.environ.get(GIVEN)
    if not given:
        return once(cache_root() / f"kubernetes-{KUBERNETES}-containerd-{CONTAINERD}", _build)
    missing = [name for name in (*COMMANDS, *RUNTIME) if not (Path(given) / name).exists()]
    if missing:
        raise BuildError(f"{GIVEN}={given} has no {', '.join(missing)}")
    return Path(given)


def _build(folder: Path) -> None:
    compiler = go()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as work:
        source = Path(work)
        say(f"building Kubernetes {KUBERNETES}: some 5 minutes on 2 cores, once")
        (source / "go.mod").write_text(_go_mod(compiler, source))
        packages = [f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS]
        imports = "".join(f'\t_ "{package}"\n' for package in packages)
        (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n")
        run([compiler, "mod", "tidy"], source)
        run([compiler, "build", "-trimpath", "-ldflags", _stamp(), "-o", f"{folder}/", *packages], source)
        say(f"building containerd {CONTAINERD}: some 50 seconds")
        for name in RUNTIME:
            package = f"github.com/containerd/containerd/v2/cmd/{name}@v{CONTAINERD}"
            run([compiler, "install", package], source, GOBIN=str(folder))


def _go_mod(compiler: str, source: Path) -> str:
    found = run([compiler, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}"], source.parent)
    upstream = Path(json.loads(found)["GoMod"]).read_text()
    version = next(line for line in upstream.splitlines() if line.startswith("go "))
    staging = re.findall(r"(k8s\.io/[a-z0-9-]+) => \./staging", upstream)
    minor_and_patch = KUBERNETES.partition(".")[2]
    replaced = "".join(f"\t{module} => {module} v0.{minor_and_patch}\n" for module in staging)
    return f"module lab\n\n{version}\n\nrequire k8s.io/kubernetes v{KUBERNETES}\n\nreplace (\n{replaced})\n"


def _stamp() -> str:
    """Return linker flags that stamp the version: clients can't parse what an unstamped build says."""
    major, minor, _ = KUBERNETES.split(".")
    values = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = (f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())
    return " ".join(("-s -w", *stamps))
