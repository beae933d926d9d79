"""A second uninstallation while VMs use vGPUs: it keeps what the first one has kept."""

from gpuvirt.controller.install.uninstall import Goals, Uninstaller
from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.kube.labels import OPERAND_LABEL
from tests.kube.contestedlease import Hasty, Peer, election, serving
from tests.kube.scriptedapi import Call, Reply
from tests.web.certificates import Authority, Pair

GPU_NODES = "/apis/gpuvirt.io/v1alpha1/gpunodes"
DAEMON_SETS = "/apis/apps/v1/namespaces/gpuvirt/daemonsets"
KIND = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


Object = dict[str, object]


def gpu_node(name: str, *users: str) -> Object:
    vgpu = {"id": "4d3b2e1f-0000-4000-8000-000000000001", "type": "NVIDIA A10-4Q", "users": users}
    gpu = {"address": "0000:65:00.0", "mode": "vgpu", "vgpus": [vgpu]}
    return {"metadata": {"name": name, "uid": name}, "status": {"gpus": [gpu]}}


class Api:
    """An API server with a vGPU manager, a GpuNode with a vGPU in use and one without."""

    def __init__(self) -> None:
        self.peer = Peer(0)
        manager = {"name": "vgpu-manager", "uid": "m", "labels": {OPERAND_LABEL: OperandName.VGPU_MANAGER}}
        self.objects: dict[str, Object] = {
            f"{GPU_NODES}/used": gpu_node("used", "pod prod/vm"),
            f"{GPU_NODES}/free": gpu_node("free"),
        }
        self.objects[f"{DAEMON_SETS}/vgpu-manager"] = {"metadata": manager}
        self.kinds: set[str] = set()

    def answer(self, call: Call) -> Reply:
        if call.path.startswith(KIND):
            name = call.path.rpartition("/")[2]
            definition = {"metadata": {"name": name, "uid": name}, "spec": {"group": "gpuvirt.io"}}
            self.kinds |= {name} if call.method == "DELETE" else set()
            return 200, definition
        if call.method == "DELETE" and call.path in self.objects:
            return 200, self.objects.pop(call.path)
        if call.path in {GPU_NODES, DAEMON_SETS}:
            asked = {} if "discover" in call.target else self.objects
            items = [found for path, found in asked.items() if path.startswith(f"{call.path}/")]
            return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
        return self.peer.answer(call)


async def test_what_vgpus_in_use_need_stays_however_often_gpuvirt_is_uninstalled(
    authority: Authority, server: Pair
) -> None:
    api = Api()
    async with serving(api.answer, server, authority.certificate) as (_, client):
        for _ in range(2):
            goals = Goals("gpuvirt", crds=True)
            lines = [
                line async for line in Uninstaller(client, goals, Hasty(), election(client, "uninstall-host")).run()
            ]
            assert any("kept daemonsets vgpu-manager: VMs use vGPUs on used" in line for line in lines)
            assert any("kept GpuNode used" in line for line in lines)
            assert api.objects.keys() == {f"{GPU_NODES}/used", f"{DAEMON_SETS}/vgpu-manager"}
            assert "gpunodes.gpuvirt.io" not in api.kinds
            assert "vgpuschedules.gpuvirt.io" in api.kinds
