"""A faster concurrent writer on a real API server: gpuvirt's writes never fail with a conflict."""

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from lab.cluster import settings
from lab.cluster.playedcluster import PlayedCluster

from tests.cluster.labnamespace import GPUVIRT
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.web.certificates import Authority

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/gpuvirt-controller"
MANIFEST = "{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: gpuvirt-controller}}"


def passing_on(lab: PlayedCluster) -> Callable[[Call], Reply]:
    """Return a handler that forwards requests to the lab's API server."""
    context = ssl.create_default_context(cafile=str(lab.ca))

    def answer(call: Call) -> Reply:
        headers = {name: call.headers[name] for name in ("authorization", "content-type") if name in call.headers}
        url = f"{lab.server}{call.target}"
        request = Request(url, call.body or None, headers, method=call.method)  # noqa: S310  the lab's own server
        try:
            with urlopen(request, context=context) as reply:  # noqa: S310  the lab's own server
                return reply.status, json.load(reply)
        except HTTPError as error:
            reported = error.read().decode()
            return error.code, json.loads(reported) if reported.startswith("{") else {"message": reported}

    return answer


@pytest.mark.parametrize("existing", [True, False])
async def test_an_uninstall_acquires_a_lease_that_another_program_writes_concurrently(
    lab: PlayedCluster, tmp_path: Path, existing: bool
) -> None:
    """Before each of three reads of the lease another writer changes it, or creates it if it is absent."""
    lab.kubectl("delete", "lease", "gpuvirt-controller", "--namespace", "default", "--ignore-not-found")
    if existing:
        assert lab.kubectl("apply", "--namespace", "default", "-f", "-", given=MANIFEST).returncode == 0
    rivals = list(range(3))
    statuses: list[int] = []
    pass_on = passing_on(lab)

    def answer(call: Call) -> Reply:
        reply = pass_on(call)
        if call.path == LEASE and call.method == "GET" and rivals:
            lab.kubectl("apply", "--namespace", "default", "-f", "-", given=MANIFEST)
            note = f"example.com/rival={rivals.pop()}"
            assert lab.kubectl("annotate", "--overwrite", "lease", "gpuvirt-controller", note).returncode == 0
        if call.path.startswith(LEASE.rpartition("/")[0]):
            statuses.append(reply[0])
        return reply

    authority = Authority(tmp_path)
    server = authority.server("gateway", alternatives="IP:127.0.0.1")
    async with scripted(answer, server, authority.certificate) as api:
        path = tmp_path / "kubeconfig"
        path.write_text(f"""
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{api.port}", certificate-authority: authority.crt}}}}]
users: [{{name: u, user: {{token: {settings.TOKENS.partition(",")[0]}}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
""")
        command = [*GPUVIRT, "uninstall", "--namespace", "default", "--kubeconfig", str(path)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    assert out.decode().startswith("no controller leads for 10 minutes\n")
    assert statuses.count(409) == 3
    held = ("get", "lease", "gpuvirt-controller", "--namespace", "default", "-o", "jsonpath={.spec.holderIdentity}")
    assert lab.kubectl(*held).stdout.startswith("uninstall-")
    lab.kubectl("delete", "lease", "gpuvirt-controller", "--namespace", "default")
