"""Whether a node's container runtime applies CDI devices, without which no container gets a share.

A runtime that ignores the device of an answer would start the container with whatever GPUs its environment asks for.
So units are offered only where CDI is known to work. Sources: containerd's releases (CDI came with 1.7.2, is on by
default from 2.0 on, and can't be switched off from 2.4 on); CRI-O has it since 1.23.
"""

import re
from collections.abc import Mapping

import msgspec

_VERSION = re.compile(r"(?P<name>[a-z-]+)://v?(?P<major>\d+)\.(?P<minor>\d+)(?:\.(?P<patch>\d+))?")


class ContainerRuntime(msgspec.Struct, frozen=True):
    """The container runtime of a node."""

    version: str
    """As the Node object has it: `containerd://2.1.3`."""
    enabled: bool | None = None
    """The setting `enable_cdi` of its configuration; None where it is not set, or the configuration was not found."""


def why_no_cdi(runtime: ContainerRuntime) -> str | None:
    """Return why a runtime does not apply CDI devices, None if it does."""
    found = _VERSION.match(runtime.version)
    if found is None:
        return f"its version {runtime.version!r} is not known to support CDI"
    version = tuple(int(found[part] or 0) for part in ("major", "minor", "patch"))
    obstacles: Mapping[str, Mapping[str, bool]] = {
        "cri-o": {"CRI-O has CDI from version 1.23 on": version < (1, 23, 0)},
        "containerd": {
            "containerd has CDI from version 1.7.2 on": version < (1, 7, 2),
            "containerd 1.7 has CDI off unless enable_cdi is true": version < (2, 0, 0) and runtime.enabled is not True,
            "enable_cdi is false": version < (2, 4, 0) and runtime.enabled is False,
        },
    }
    by_name = obstacles.get(found["name"], {f"{found['name']} gets no CDI devices from the kubelet": True})
    return next((text for text, is_so in by_name.items() if is_so), None)
