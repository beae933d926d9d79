"""The roles of examples/roles on a real API server: who has a command's roles may run it, and nobody else may."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from lab.cluster import settings

from tests.cli.commandline import ran
from tests.cluster.controllerlab import ROOT
from tests.cluster.labnamespace import LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

KINDS = ("gpunodes", "clusterpolicies", "vgpuschedules")
ROLES = str(ROOT / "examples/roles/commands.yaml")
RELEASE = "gpu-operator"
COMMANDS = {
    "gpuvirt-plan": "devices --all-nodes",
    "gpuvirt-shares": "shares",
    "gpuvirt-status": f"status -n {RELEASE}",
    "gpuvirt-schedule": f"schedule list -n {RELEASE}",
}


def test_a_role_permits_its_command_to_whom_it_is_bound(node: LabNamespace, tmp_path: Path) -> None:
    cluster = node.cluster
    path = tmp_path / "kubeconfig"

    def run(user: str, command: str) -> CompletedProcess[str]:
        path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: '{cluster.server}', certificate-authority: {cluster.ca}}}}}]
users: [{{name: u, user: {{token: {settings.ADMIN_TOKEN}, as: {user}}}}}]
""")
        return ran(*command.split(), "--kubeconfig", str(path))

    for kind in KINDS:
        node.kubectl("apply", "-f", str(ROOT / f"deploy/{kind}.yaml"))
        node.until(lambda kind=kind: cluster.kubectl("get", kind).returncode == 0, lambda: "not served")  # type: ignore[misc]
    cluster.kubectl("create", "namespace", RELEASE)
    try:
        applied = cluster.kubectl("apply", "-f", ROLES)
        assert applied.returncode == 0, applied.stderr
        for role, command in COMMANDS.items():
            node.kubectl("create", "clusterrolebinding", role, f"--clusterrole={role}", f"--user={role}")
            cluster.kubectl("create", "rolebinding", role, f"--role={role}", f"--user={role}", "-n", RELEASE)
            node.until(lambda: "orbidden" not in _text(run(role, command)), lambda: _text(run(role, command)))  # noqa: B023
            refused = run("stranger", command)
            assert refused.returncode != 0
            assert "orbidden" in _text(refused), (command, _text(refused))
    finally:
        cluster.kubectl("delete", "-f", ROLES)
        cluster.kubectl("delete", "clusterrolebinding", *COMMANDS)


def _text(done: CompletedProcess[str]) -> str:
    return done.stdout + done.stderr
