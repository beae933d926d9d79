"""The agent's rights on GpuNodes on a real API server: it may write its own and no other one."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ApiRefusedError, ForbiddenError
from gpuvirt.kube.kinds.gpunode import API_VERSION, GPU_NODES, KIND, GpuNode
from tests.cluster.apilab import ACCOUNT, NAMESPACE, ApiLab
from tests.cluster.controllerlab import install_gpunodes
from tests.cluster.labnamespace import LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]


async def test_an_agent_may_write_only_its_own_gpunode(node: LabNamespace, tmp_path: Path) -> None:
    api = ApiLab(node.cluster, tmp_path)
    install_gpunodes(node)
    api.apply_roles()
    account = ("get", "serviceaccount", ACCOUNT, "--namespace", NAMESPACE)
    node.until(lambda: node.cluster.kubectl(*account).returncode == 0, lambda: "no service account")
    api.token.write_text(api.token_of())
    client = Client(api.credentials)

    def new(name: str, **more: object) -> Mapping[str, object]:
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, **more}

    async def refusal(content: object) -> ApiError | None:
        try:
            await client.create(GPU_NODES, content, GpuNode)
        except ApiError as error:
            return error
        return None

    for content in (new("other"), new(NODE, spec={"mode": "vgpu"})):
        found = await refusal(content)
        while found is None or "gpuvirt's agent may" not in str(found):  # the admission policy is not in force yet
            node.kubectl("delete", "gpunodes", "--all")
            found = await refusal(content)
    owned = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": NODE, "finalizers": ["example.com/stay"]}}
    assert "may not set or change the finalizers or owners" in str(await refusal(owned))
    assert await refusal(new(NODE)) is None
    status = {"status": {"agent": "test"}}
    written = await client.patch(GPU_NODES, NODE, status, PatchType.MERGE, GpuNode, part="status")
    assert written.status is not None
    assert written.status.agent == "test"
    with pytest.raises(ForbiddenError):
        await client.patch(GPU_NODES, NODE, {"spec": {"mode": "vgpu"}}, PatchType.MERGE, GpuNode)
    node.cluster.kubectl(
        "create",
        "-f",
        "-",
        given=f'{{"apiVersion": "{API_VERSION}", "kind": "{KIND}", "metadata": {{"name": "other"}}}}',
    )
    with pytest.raises(ApiRefusedError, match="only the GpuNode of its own node"):
        await client.patch(GPU_NODES, "other", status, PatchType.MERGE, GpuNode, part="status")
