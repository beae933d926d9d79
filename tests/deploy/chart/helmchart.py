"""The chart as helm renders it, and look-ups in the rendering."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from gpuvirt.plain import Plain

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/chart"
NAMESPACE = "gpu-operator"

Manifest = Mapping[str, Plain]


def at(content: Plain | Manifest, *steps: str | int) -> Plain:
    """Return the value at a path of a document; None if it is absent."""
    for step in steps:
        if isinstance(content, Mapping) and isinstance(step, str):
            content = content.get(step)
        elif isinstance(content, list) and isinstance(step, int) and step < len(content):
            content = content[step]
        else:
            return None
    assert not isinstance(content, Mapping) or isinstance(content, dict)
    return content


def items(content: Plain) -> list[Plain]:
    """Return a list of a document; an absent list is empty."""
    assert content is None or isinstance(content, list)
    return content or []


def one_line(content: str) -> str:
    """Return helm's output on one line."""
    return " ".join(content.split())


@dataclass(frozen=True, slots=True)
class Rendered:
    """All manifests of one rendering, hooks too."""

    manifests: Sequence[Manifest]

    def named(self, kind: str) -> Mapping[str, Manifest]:
        """Return the objects of a kind by their names."""
        return {
            str(at(manifest, "metadata", "name")): manifest for manifest in self.manifests if manifest["kind"] == kind
        }

    def one(self, kind: str, name: str) -> Manifest:
        """Return the object of a kind and name."""
        return self.named(kind)[name]

    @property
    def policy(self) -> Plain:
        """The ClusterPolicy that a Job applies."""
        text = at(self.one("ConfigMap", "gpuvirt-policy"), "data", "clusterpolicy.yaml")
        policy: Plain = yaml.load(str(text), yaml.CSafeLoader)
        return policy

    def hooks(self) -> Sequence[Manifest]:
        """Return the hook objects."""
        return [manifest for manifest in self.manifests if at(manifest, "metadata", "annotations", "helm.sh/hook")]

    def pods(self) -> Mapping[str, Plain]:
        """Return the specs of all pods by the names of their workloads."""
        makers = {"Deployment", "DaemonSet", "Job"}
        found = (manifest for manifest in self.manifests if manifest["kind"] in makers)
        return {str(at(manifest, "metadata", "name")): at(manifest, "spec", "template", "spec") for manifest in found}


@dataclass(frozen=True, slots=True)
class Helm:
    """The command."""

    command: Path

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run it."""
        return subprocess.run([self.command, *arguments], capture_output=True, text=True, check=False)

    def template(self, *values: str, options: Sequence[str] = (), chart: Path = CHART) -> Rendered:
        """Render the chart with values as `--set` has them."""
        sets = [f"--set={value}" for value in values]
        done = self.run("template", "x", str(chart), f"--namespace={NAMESPACE}", *sets, *options)
        assert done.returncode == 0, done.stderr
        return Rendered([document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document])

    def refusal(self, *values: str, options: Sequence[str] = ()) -> str:
        """Return helm's error message about values."""
        done = self.run("template", "x", str(CHART), *options, *(f"--set={value}" for value in values))
        assert done.returncode != 0, done.stdout
        return one_line(done.stderr)
