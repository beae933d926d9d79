"""KubeVirt's VMs by the names of their pods, `virt-launcher-NAME-xxxxx`, in which very long names are shortened."""

import re
from collections.abc import Iterable

_LAUNCHER = re.compile(r"virt-launcher-([^/ ]+)-[a-z0-9]{5}")


def vm_of(namespace: str | None, pod: str) -> str | None:
    """Return the VM that runs in a pod, as `namespace/name`; None for other pods."""
    if not pod.startswith("virt-launcher-"):
        return None  # a node may have thousands of other pods
    found = _LAUNCHER.fullmatch(pod)
    return f"{namespace}/{found[1]}" if found is not None else None


def user_text(user: str) -> str:
    """Return a user of a device as people know it: the VM `VM default/vm-a` in place of its pod."""
    kind, _, name = user.partition(" ")
    namespace, _, pod = name.partition("/")
    vm = vm_of(namespace, pod) if kind == "pod" else None
    return f"VM {vm}" if vm is not None else user


def user_texts(users: Iterable[str]) -> tuple[str, ...]:
    """Return users of devices as people know them, each once."""
    return tuple(dict.fromkeys(map(user_text, users)))
