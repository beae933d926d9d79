"""`gpuvirt install verify` passes for a working installation, and names the part that does not work."""

import asyncio
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.cli.commandline import GPUVIRT, PATH
from tests.extender.podapi import serving
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply

NAMESPACE = "gpu-operator"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpuvirt-controller"


def items(*found: object) -> Reply:
    return 200, {"metadata": {"resourceVersion": "1"}, "items": list(found)}


class Cluster:
    """A cluster with a release and no GPUs."""

    def __init__(self) -> None:
        self.kinds = {
            "clusterpolicies.nvidia.com": "True",
            "gpunodes.gpuvirt.io": "True",
            "vgpuschedules.gpuvirt.io": "True",
        }
        self.holder = "gpuvirt-controller-1"
        self.renews = True
        self.renewals = 0
        self.state = "ready"

    def answer(self, call: Call) -> Reply:
        if call.path.startswith(DEFINITIONS):
            return self.definition(call.path.removeprefix(DEFINITIONS))
        if call.path == LEASE:
            self.renewals += self.renews
            times = {"renewTime": f"2026-01-01T00:00:{self.renewals % 60:02}.000000Z", "leaseDurationSeconds": 15}
            return 200, {"metadata": {"name": "gpuvirt-controller"}, "spec": {"holderIdentity": self.holder, **times}}
        if call.path == "/apis/nvidia.com/v1/clusterpolicies":
            ready = {"type": "Ready", "status": "True", "reason": "Reconciled", "message": "why it is not"}
            ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
            status = {"state": self.state, "namespace": NAMESPACE, "conditions": [ready]}
            return items({"metadata": {"name": "cluster-policy"}, "spec": {}, "status": status})
        return items()

    def definition(self, name: str) -> Reply:
        if name not in self.kinds:
            return NOT_FOUND
        established = {"type": "Established", "status": self.kinds[name]}
        spec = {"group": name.partition(".")[2]}
        return 200, {"metadata": {"name": name}, "spec": spec, "status": {"conditions": [established]}}


async def run(cluster: Cluster, folder: Path, timeout_s: int = 30) -> CompletedProcess[str]:
    async with serving(cluster.answer, folder) as served:
        command = (
            "install",
            "verify",
            "--kubeconfig",
            str(served.kubeconfig),
            "-n",
            NAMESPACE,
            f"--timeout={timeout_s}",
        )
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*GPUVIRT, *command, stdout=pipe, stderr=pipe, env={"PATH": PATH})
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        return CompletedProcess(command, process.returncode or 0, out.decode(), err.decode())


async def test_a_working_installation_passes(tmp_path: Path) -> None:
    done = await run(Cluster(), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "gpunodes.gpuvirt.io: served",
        "vgpuschedules.gpuvirt.io: served",
        "clusterpolicies.nvidia.com: served",
        "controller: gpuvirt-controller-1 leads",
        "Ready: gpuvirt in namespace gpu-operator, 0 nodes with GPUs",
    ]


@pytest.mark.parametrize(("established", "why"), [(None, "is missing"), ("False", "does not serve")])
async def test_a_kind_that_is_not_served_fails(tmp_path: Path, established: str | None, why: str) -> None:
    cluster = Cluster()
    del cluster.kinds["gpunodes.gpuvirt.io"]
    if established is not None:
        cluster.kinds["gpunodes.gpuvirt.io"] = established
    done = await run(cluster, tmp_path)
    assert done.returncode == 1
    assert "gpunodes.gpuvirt.io" in done.stderr
    assert why in done.stderr
    assert "ready" not in done.stdout.lower()


@pytest.mark.parametrize(("holder", "renews"), [("gone", False), ("", True), ("uninstall-x", True)])
async def test_a_ready_policy_does_not_stand_for_a_controller_that_is_gone(
    tmp_path: Path, holder: str, *, renews: bool
) -> None:
    cluster = Cluster()
    cluster.holder, cluster.renews = holder, renews
    done = await run(cluster, tmp_path, timeout_s=3)
    assert done.returncode == 1
    assert "no controller leads" in done.stderr
    assert "Ready" not in done.stdout


async def test_a_policy_that_is_not_ready_fails_with_its_reason(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.state = "notReady"
    done = await run(cluster, tmp_path, timeout_s=3)
    assert done.returncode == 1
    assert "Not ready: ClusterPolicy cluster-policy is notReady" in done.stderr
    assert "why it is not" in done.stderr
