"""Pods with shares of GPUs: their containers, what these print, and the fields that tests read."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tests.cluster.labnamespace import BOX

VGPU = "nvidia.com/vgpu"
SHOW = "env | grep -E '^(GPUVIRT|NVIDIA)_' | sort; ls /dev | grep nvidia; echo end"
SLEEP = f"{SHOW}; sleep 1000"


class Metadata(msgspec.Struct):
    """Fields of a pod's metadata."""

    name: str
    uid: str
    annotations: dict[str, str] = {}


class Condition(msgspec.Struct):
    """A condition of a pod."""

    type: str
    status: str
    message: str = ""


class Container(msgspec.Struct, rename={"id": "containerID", "restarts": "restartCount"}):
    """Fields of a container's status."""

    id: str = ""
    restarts: int = 0


class Status(msgspec.Struct, rename="camel"):
    """Fields of a pod's status."""

    conditions: list[Condition] = []
    container_statuses: list[Container] = []


class Pod(msgspec.Struct):
    """Fields of a pod."""

    metadata: Metadata
    status: Status


class Pods(msgspec.Struct):
    """A list of pods."""

    items: list[Pod]


@dataclass(frozen=True, slots=True)
class Part:
    """A container of a pod, with its units."""

    units: int
    name: str = "main"
    script: str = SLEEP
    init: bool = False
    sidecar: bool = False

    @property
    def manifest(self) -> Mapping[str, object]:
        """The container; its own environment asks for all GPUs."""
        return {
            "name": self.name,
            "image": BOX,
            "imagePullPolicy": "Never",
            "args": [self.script],
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
            "resources": {"limits": {VGPU: str(self.units)}},
            **({"restartPolicy": "Always"} if self.sidecar else {}),
        }


@dataclass(frozen=True, slots=True)
class Printed:
    """The GPUs, units and device nodes that a container has printed."""

    gpus: frozenset[str]
    units: int
    nodes: frozenset[str]
    """`nvidia0`."""
