"""`gpuvirt status` finds the release by itself, says in one line whether all is well, and can wait until it is."""

import asyncio
import json
from pathlib import Path
from subprocess import CompletedProcess

from tests.cli.commandline import GPUVIRT, PATH
from tests.cli.statuscluster import (
    NAMESPACE,
    NODE,
    PULLED,
    READY,
    VGPU_MANAGER,
    Cluster,
    sharing_gpu_node,
    sharing_node,
)
from tests.extender.podapi import serving


async def run(cluster: Cluster, folder: Path, *arguments: str) -> CompletedProcess[str]:
    """Run the command; the kubeconfig's context has another namespace than the release."""
    async with serving(cluster.answer, folder) as served:
        command = ("status", "--kubeconfig", str(served.kubeconfig), *arguments)
        process = await started(*command)
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        return CompletedProcess(command, process.returncode or 0, out.decode(), err.decode())


async def started(*arguments: str) -> asyncio.subprocess.Process:
    environment = {"PATH": PATH, "COLUMNS": "80"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*GPUVIRT, *arguments, stdout=pipe, stderr=pipe, env=environment)


async def test_the_release_is_found_whatever_the_namespace_of_the_context_is(tmp_path: Path) -> None:
    done = await run(Cluster(), tmp_path, "-o", "json")
    found = json.loads(done.stdout)
    assert found["namespace"] == NAMESPACE
    assert {row["state"] for row in found["components"]}.isdisjoint({"PodMissing"})


async def test_another_namespace_is_not_believed(tmp_path: Path) -> None:
    right = await run(Cluster(), tmp_path, "-n", NAMESPACE)
    wrong = await run(Cluster(), tmp_path, "-n", "wrong")
    assert wrong.stdout == right.stdout
    assert "gpuvirt runs in namespace gpu-operator, not in wrong" in wrong.stderr
    assert right.stderr == ""


async def test_the_components_of_nodes_are_selected_by_labels(tmp_path: Path) -> None:
    cluster = Cluster()
    second = {"metadata": {**NODE["metadata"], "name": "node02"}}
    cluster.nodes, cluster.selected = (NODE, second), (second,)
    assert (await run(cluster, tmp_path, "-o", "name")).stdout == "node/node01\nnode/node02\n"
    assert (await run(cluster, tmp_path, "-l", "rack=b", "-o", "name")).stdout == "node/node02\n"


async def test_the_first_line_is_a_verdict(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.state = "notReady"
    done = await run(cluster, tmp_path)
    first = done.stdout.splitlines()[0]
    assert (done.returncode, first.startswith("Not ready: ")) == (1, True), first
    assert "namespace gpu-operator" in done.stdout


async def test_a_kubevirt_that_lacks_the_offered_devices_is_not_ready(tmp_path: Path) -> None:
    cluster = Cluster()
    lacking = "KubeVirt kubevirt/kubevirt lacks fields | gpuvirt would write: add /spec/configuration/x"
    missing = {**READY, "type": "KubeVirtConfigured", "status": "False", "reason": "KubeVirtNotManaged"}
    cluster.kubevirt = {**missing, "message": lacking}
    done = await run(cluster, tmp_path)
    text = " ".join(done.stdout.split())
    assert "nodes not ready, KubeVirt is not configured for the offered devices; gpuvirt in namespace" in text
    assert (done.returncode, f"KubeVirtNotManaged: {lacking}" in text) == (1, True)


async def test_the_hold_of_an_uninstall_is_shown_while_it_keeps_controllers_from_leading(tmp_path: Path) -> None:
    lift = "kubectl delete lease gpuvirt-controller -n gpu-operator"
    for leader, state, is_shown in (
        ("uninstall-job-x", "notReady", True),
        ("uninstall-job-x", "ready", True),  # the last controller's word: the node is not ready
        ("gpuvirt-controller-a", "notReady", False),
        ("", "notReady", False),
    ):
        cluster = Cluster()
        cluster.leader, cluster.state = leader, state
        text = " ".join((await run(cluster, tmp_path)).stdout.split())
        assert (lift in text) is is_shown, text


async def test_a_cluster_without_the_kinds_says_what_to_install(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.installed = False
    done = await run(cluster, tmp_path)
    assert done.returncode == 1
    assert done.stdout == (
        "Not installed: this cluster has no kind ClusterPolicy.\n"
        "  fix: helm install gpuvirt deploy/chart -n gpu-operator --create-namespace\n"
        "       --set image.repository=REGISTRY/gpuvirt\n"
    )


async def test_a_pod_that_is_not_ready_has_the_cause_that_events_give(tmp_path: Path) -> None:
    cluster = Cluster(VGPU_MANAGER)
    reported = await run(cluster, tmp_path)
    assert 'FailedMount: secret "licence" not found' in reported.stdout
    cluster.may_read_events = False
    without = await run(cluster, tmp_path)
    assert "kubectl describe pod vgpu-manager-b -n gpu-operator" in " ".join(without.stdout.split())
    cluster.may_read_events, cluster.events = True, (PULLED,)
    assert "no warning says why" in " ".join((await run(cluster, tmp_path)).stdout.split())


async def test_a_pod_whose_init_container_runs_names_it(tmp_path: Path) -> None:
    states = [{"name": "sidecar", "state": {"running": {}}}, {"name": "driver-validation", "state": {"running": {}}}]
    cluster = Cluster({**VGPU_MANAGER, "status": {"phase": "Pending", "initContainerStatuses": states}})
    text = " ".join((await run(cluster, tmp_path)).stdout.split())
    log = "kubectl logs vgpu-manager-b -n gpu-operator -c driver-validation"
    assert f"waits for its init container driver-validation; see {log}" in text


async def test_a_node_that_waits_to_stop_sharing_names_the_pods_with_shares(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.nodes, cluster.gpu_nodes = (sharing_node("shared"),), (sharing_gpu_node("pod default/a", units=1000),)
    shares = (await run(cluster, tmp_path)).stdout
    assert ("2000 units of 2 GPUs" in " ".join(shares.split()), "Draining" in shares) == (True, False), shares
    cluster.nodes = (sharing_node("container"),)
    cluster.gpu_nodes = (sharing_gpu_node("pod default/a", "pod team/b", units=None),)
    done = await run(cluster, tmp_path)
    text = " ".join(done.stdout.split())
    assert (done.returncode, "Draining" in text) == (1, True), done.stdout
    assert (
        "the node becomes container once these GPUs are free: 0000:65:00.0 (shared, used by pod default/a, pod team/b)"
        in text
    )
    cluster.state = "notReady"
    assert " ".join((await run(cluster, tmp_path)).stdout.split()).count("pod team/b") == 1


async def test_waiting_ends_when_the_policy_is_ready_or_the_time_is_over(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ready_after = 10**6
    late = await run(cluster, tmp_path, "--wait", "--timeout", "1")
    assert late.returncode == 1
    assert late.stdout.startswith("Not ready: ")
    assert "still not ready after 1 s" in late.stderr
    assert cluster.asked > 1


async def test_watching_shows_each_change(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ready_after, cluster.nodes = 2, ()
    async with serving(cluster.answer, tmp_path) as served:
        process = await started("status", "--watch", "--kubeconfig", str(served.kubeconfig))
        assert process.stdout is not None
        async with asyncio.timeout(60):
            lines = [await process.stdout.readline()]
            while not lines[-1].startswith(b"Ready: "):
                lines.append(await process.stdout.readline())
        process.kill()
        await process.wait()
    assert lines[0].startswith(b"Not ready: ")
