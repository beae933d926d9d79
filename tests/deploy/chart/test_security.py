"""SECURITY.md's table of rights says of each program what its manifest asks for."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import ROOT, Helm, at, items

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

PROGRAMS = {
    "controller": "gpuvirt-controller",
    "scheduler extender": "gpuvirt-extender",
    "webhook": "gpuvirt-webhook",
    "second scheduler": "gpuvirt-scheduler",
}
"""The rows of the chart's Deployments."""
HAND_APPLIED = {
    "node agent": "node.yaml",
    "device plugin": "plugin-only.yaml",
    "gpuvirt discover": "discover.yaml",
}
"""The rows of the DaemonSets that users may also apply without the chart."""


def rows() -> Mapping[str, str]:
    """Return the user and the rights of each program, by the first words of its row."""
    table = re.findall(r"^\| (.+?) \| (.+?) \|", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    return {name.replace("`", "").partition(" (")[0]: runs_as for name, runs_as in table}


def run_as(pod: Plain) -> str:
    """Return what SECURITY.md must say of a pod."""
    (container,) = items(at(pod, "containers"))
    user = at(container, "securityContext", "runAsUser")
    user = at(pod, "securityContext", "runAsUser") if user is None else user
    words = [f"UID {user}" if user else "root"]
    if at(container, "securityContext", "privileged") is True:
        words.append("privileged")
    if at(pod, "hostPID") is True:
        words.append("`hostPID`")
    if at(container, "securityContext", "capabilities", "drop") == ["ALL"]:
        words.append("no capabilities")
    return ", ".join(words)


def test_the_chart_runs_no_other_programs_with_other_rights(helm: Helm) -> None:
    enabled = [f"{name}.enabled=true" for name in ("extender", "scheduler", "webhook", "schedule", "sandboxWorkloads")]
    rendered = helm.template(*enabled, "webhook.config.classes.kata-gpu.profile=hot-plug")
    deployments = {name: at(made, "spec", "template", "spec") for name, made in rendered.named("Deployment").items()}
    assert set(deployments) == set(PROGRAMS.values())
    assert {row: run_as(deployments[name]) for row, name in PROGRAMS.items()} == {row: rows()[row] for row in PROGRAMS}


@pytest.mark.parametrize("row", HAND_APPLIED)
def test_the_agents_rights_are_those_of_their_manifests(row: str) -> None:
    manifests = yaml.safe_load_all(Path(ROOT / "deploy" / HAND_APPLIED[row]).read_text())
    (pod,) = (at(made, "spec", "template", "spec") for made in manifests if made["kind"] == "DaemonSet")
    assert rows()[row].removesuffix(", read-only root file system") == run_as(pod)
