"""The CDI spec of a node's GPUs, as NVIDIA's container toolkit writes it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

KIND = "nvidia.com/gpu"


def gpus(host: Path) -> Mapping[int, str]:
    """Return the UUIDs of the GPUs that NVIDIA's driver has on a host, by the numbers of their device nodes."""
    texts = [path.read_text() for path in host.glob("proc/driver/nvidia/gpus/*/information")]
    return {int(_field(text, "Device Minor")): _field(text, "GPU UUID") for text in texts}


def write_spec(folder: Path, gpus: Mapping[int, str]) -> None:
    """Write the spec of these GPUs."""
    (folder / "nvidia.json").write_text(json.dumps(spec(gpus)))


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
    if found is None:
        raise ValueError(f"the driver's information of a GPU has no field {name!r}:\n{text}")
    return found[1].strip()
