"""The webhook's additions to a pod, by the settings of its RuntimeClass: containers, volumes, mounts and variables.

The node's `/dev` as a volume is the guest's: Kata's runtime does not share `/dev` of the host, and its agent mounts the
path of the guest instead.

The user's containers that request vGPUs get mounts, and the driver's folders in two variables. A user's own value is
kept: a folder is appended to it, and where that can't be done, the user gets a warning.
"""

from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath

import msgspec

from gpuvirt.kube.jsonpatch import Op, Operation
from gpuvirt.kube.kinds.podparts import (
    Capabilities,
    Container,
    EnvVar,
    HostPathSource,
    ResourceNeeds,
    SecretSource,
    SecurityContext,
    Volume,
    VolumeMount,
)
from gpuvirt.plain import Plain
from gpuvirt.webhook.injectionconfig import SYSTEM_PATH, AddedContainer, ClassSettings
from gpuvirt.webhook.pod import Container as ObservedContainer
from gpuvirt.webhook.pod import Placed

NVIDIA, GRIDD = "nvidia", "gridd"
DEV, DRIVER, LICENCE = "dev", "nvidia-driver", "nvidia-licence"
LOADER_TREE, TREE = "/var/lib/nvidia", "/usr/share/nvidia"
TOKEN = "/etc/nvidia/ClientConfigToken"  # noqa: S105  a folder
LIBRARIES = f"{TREE}/lib64"
PROGRAMS = f"{TREE}/bin"
DEV_MOUNT = VolumeMount(name=DEV, mount_path="/dev")
TREE_MOUNT = VolumeMount(name=DRIVER, mount_path=TREE, read_only=True)


class ContainerChange(msgspec.Struct, frozen=True):
    """The changes to a container, and the warnings for its user."""

    operations: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    volumes: frozenset[str] = frozenset()
    """The names of the volumes that the container needs."""


def container_change(placed: Placed, settings: ClassSettings) -> ContainerChange:
    """Return the changes of a container that requests a vGPU."""
    mounts, warnings = _mounts(placed, settings)
    variables, more = _variables(placed, settings)
    operations = (
        *append(placed.pointer("volumeMounts"), [plain(mount) for mount in mounts], placed.container.volume_mounts),
        *variables,
    )
    needed = frozenset(mount.name for mount in user_mounts(settings))
    return ContainerChange(operations, (*warnings, *more), needed)


def append(pointer: str, entries: list[Plain], existing: tuple[object, ...]) -> Iterator[Operation]:
    """Yield the operations that append entries to a list; one that is absent or null is created."""
    if not existing and entries:
        yield Operation(Op.ADD, pointer, entries)
    elif entries:
        yield from (Operation(Op.ADD, f"{pointer}/-", entry) for entry in entries)


def plain(part: msgspec.Struct) -> Plain:
    """Return a part of a pod as JSON has it."""
    content: Plain = msgspec.to_builtins(part)
    return content


def _mounts(placed: Placed, settings: ClassSettings) -> tuple[list[VolumeMount], list[str]]:
    """Return the mounts that a container lacks, and warnings about paths with another mount."""
    taken = {normpath(mount.mount_path): mount.name for mount in placed.container.volume_mounts}
    missing, warnings = list[VolumeMount](), list[str]()
    for mount in user_mounts(settings):
        found = taken.get(mount.mount_path)
        if found is None:
            missing.append(mount)
        elif found != mount.name:
            warnings.append(
                f"{placed.path}: volume {found} at {mount.mount_path} is kept; the vGPU needs volume {mount.name} there"
            )
    return missing, warnings


def _variables(placed: Placed, settings: ClassSettings) -> tuple[list[Operation], list[str]]:
    containers = settings.containers
    if not containers.driver:
        return [], []
    added, operations, warnings = list[Plain](), list[Operation](), list[str]()
    folders: list[tuple[str, str, str | None]] = [("PATH", PROGRAMS, containers.path)]
    if containers.library_path:
        folders.append(("LD_LIBRARY_PATH", LIBRARIES, None))
    env = placed.container.env
    for name, folder, default in folders:
        # Of several variables with one name, the last counts.
        index, found = next(((i, env[i]) for i in reversed(range(len(env))) if env[i].name == name), (0, None))
        if found is None:
            if default != "":
                value = f"{default}:{folder}" if default else folder
                added.append(plain(EnvVar(name=name, value=value)))
        elif found.value_from is not None:
            warnings.append(f"{placed.path}: {name} has valueFrom and is kept; the vGPU needs {folder} in it")
        elif folder not in found.value.split(":"):
            value = f"{found.value}:{folder}" if found.value else folder
            operations.append(Operation(Op.ADD, placed.pointer("env", str(index), "value"), value))
    operations += append(placed.pointer("env"), added, env)
    return operations, warnings


def nvidia(settings: ClassSettings, part: AddedContainer, vgpus: Mapping[str, int]) -> Container:
    """Return the init container that loads the driver in the guest, with these vGPUs."""
    has_tree = settings.driver is not None
    mounts = [
        VolumeMount(name=DRIVER, mount_path="/lib/modules", sub_path="lib/modules", read_only=True),
        VolumeMount(name=DRIVER, mount_path=LOADER_TREE, read_only=True),
    ]
    limits = {name: str(count) for name, count in vgpus.items()}
    return _container(NVIDIA, part, LOADER_TREE if has_tree else "", [DEV_MOUNT, *(mounts if has_tree else [])], limits)


def gridd(settings: ClassSettings, part: AddedContainer, licence_secret: str) -> Container:
    """Return the sidecar with the licence daemon; as a native sidecar, it lets Jobs end."""
    has_tree = settings.driver is not None
    mounts = [TREE_MOUNT, VolumeMount(name=DRIVER, mount_path="/etc/nvidia", sub_path="etc/nvidia", read_only=True)]
    token = [VolumeMount(name=LICENCE, mount_path=TOKEN, read_only=True)] if licence_secret else []
    all_mounts = [DEV_MOUNT, *(mounts if has_tree else []), *token]
    return _container(GRIDD, part, TREE if has_tree else "", all_mounts, {}, restart_policy="Always")


def differences(own: ObservedContainer, added: Container, *, has_vgpus: bool) -> tuple[str, ...]:
    """Return the fields in which a pod's own container lacks what the added one has; `has_vgpus`: it has its vGPUs.

    The API server asks again after other webhooks have changed the pod. What they and the API server add to an added
    container (variables, mounts, defaults, amounts of cpu and memory) is therefore no difference.
    """
    env = {(variable.name, variable.value) for variable in own.env}
    mounts = {(mount.name, normpath(mount.mount_path), mount.sub_path) for mount in own.volume_mounts}
    context, needed = own.security_context, added.security_context or SecurityContext()
    capabilities = {name.upper() for name in context.capabilities.add}
    has = {
        "image": own.image == added.image,
        "command": own.command == added.command,
        "args": own.args == added.args,
        "restartPolicy": own.restart_policy == added.restart_policy,
        "env": all((variable.name, variable.value) in env for variable in added.env),
        "volumeMounts": all((mount.name, mount.mount_path, mount.sub_path) in mounts for mount in added.volume_mounts),
        "resources": has_vgpus,
        "securityContext": context.run_as_user == needed.run_as_user
        and {name.upper() for name in (needed.capabilities or Capabilities()).add} <= capabilities,
    }
    return tuple(field for field, is_equal in has.items() if not is_equal)


def _container(
    name: str,
    part: AddedContainer,
    tree: str,
    mounts: Sequence[VolumeMount],
    devices: Mapping[str, str],
    restart_policy: str = "",
) -> Container:
    env: tuple[EnvVar, ...] = ()
    if tree:
        env = (
            EnvVar(name="PATH", value=f"{SYSTEM_PATH}:{tree}/bin"),
            EnvVar(name="LD_LIBRARY_PATH", value=f"{tree}/lib64"),
        )
    return Container(
        name=name,
        image=part.image,
        image_pull_policy=part.image_pull_policy,
        command=part.command,
        restart_policy=restart_policy,
        env=env,
        resources=ResourceNeeds(requests={**part.requests, **devices}, limits={**part.limits, **devices}),
        # Loading modules and the licence need root, also where the pod says that its containers do not run as root.
        security_context=SecurityContext(
            capabilities=Capabilities(add=part.capabilities), run_as_user=0, run_as_non_root=False
        ),
        volume_mounts=tuple(mounts),
    )


def user_mounts(settings: ClassSettings) -> tuple[VolumeMount, ...]:
    """Return the mounts of a container that requests a vGPU."""
    containers = settings.containers
    return tuple(
        mount for mount, is_mounted in ((DEV_MOUNT, containers.dev), (TREE_MOUNT, containers.driver)) if is_mounted
    )


def volume(name: str, settings: ClassSettings, licence_secret: str) -> Volume:
    """Return a volume by its name."""
    if name == LICENCE:
        return Volume(name=LICENCE, secret=SecretSource(secret_name=licence_secret))
    return Volume(name=name, host_path=HostPathSource(path="/dev" if name == DEV else settings.driver or ""))
