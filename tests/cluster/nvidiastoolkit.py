"""What NVIDIA's container toolkit does on a node: a CDI spec of its GPUs, in a folder that containerd watches."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.cluster.clusterlab import LabNode

KIND = "nvidia.com/gpu"


@contextmanager
def nvidias_toolkit(node: LabNode) -> Iterator[Sequence[str]]:
    """Write the spec of the mounted host's GPUs; return their UUIDs in the order of their device nodes."""
    texts = [path.read_text() for path in node.host.glob("proc/driver/nvidia/gpus/*/information")]
    gpus = {int(_field(text, "Device Minor")): _field(text, "GPU UUID") for text in texts}
    with node.cdi_folder() as folder:
        (folder / "nvidia.json").write_text(json.dumps(spec(gpus)))
        yield [gpus[minor] for minor in sorted(gpus)]


def spec(gpus: Mapping[int, str]) -> Mapping[str, object]:
    """Return a spec like that of `nvidia-ctk cdi generate`: devices by UUID and by number, and one of all GPUs.

    The device nodes are null devices, since the computer has no GPU.
    """

    def edits(*nodes: str) -> Mapping[str, object]:
        return {"deviceNodes": [{"path": f"/dev/{node}", "hostPath": "/dev/null"} for node in nodes]}

    named = {name: [f"nvidia{minor}"] for minor, gpu in gpus.items() for name in (gpu, str(minor))}
    named["all"] = [f"nvidia{minor}" for minor in gpus]
    devices = [{"name": name, "containerEdits": edits(*nodes)} for name, nodes in named.items()]
    common = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], **edits("nvidiactl", "nvidia-uvm")}
    return {"cdiVersion": "0.5.0", "kind": KIND, "devices": devices, "containerEdits": common}


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}:(.*)$", text, re.MULTILINE)
    assert found is not None, text
    return found[1].strip()
