"""What the webhook adds to a pod, from the settings of its RuntimeClass: containers, volumes and mounts.

The node's `/dev` as a volume is the guest's: Kata's runtime does not share `/dev` of the host, and its agent mounts the
path of the guest instead.
"""

from collections.abc import Mapping, Sequence

from gpuvirt.cluster.admission.injectionconfig import SYSTEM_PATH, ClassSettings, Part, Profile
from gpuvirt.cluster.kinds.podparts import (
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

NVIDIA, GRIDD = "nvidia", "gridd"
DEV, DRIVER, LICENCE = "dev", "nvidia-driver", "nvidia-licence"
LOADER_TREE, TREE = "/var/lib/nvidia", "/usr/share/nvidia"
TOKEN = "/etc/nvidia/ClientConfigToken"  # noqa: S105  a folder
LIBRARIES = f"{TREE}/lib64"
PROGRAMS = f"{TREE}/bin"
DEV_MOUNT = VolumeMount(name=DEV, mount_path="/dev")
TREE_MOUNT = VolumeMount(name=DRIVER, mount_path=TREE, read_only=True)


def nvidia(settings: ClassSettings, part: Part, vgpus: Mapping[str, int]) -> Container:
    """Return the init container that loads the driver in the guest. With hot plug it has the pod's vGPUs."""
    has_tree = settings.driver is not None
    mounts = [
        VolumeMount(name=DRIVER, mount_path="/lib/modules", sub_path="lib/modules", read_only=True),
        VolumeMount(name=DRIVER, mount_path=LOADER_TREE, read_only=True),
    ]
    limits = {name: str(count) for name, count in vgpus.items()} if settings.profile is Profile.HOT_PLUG else {}
    return _container(NVIDIA, part, LOADER_TREE if has_tree else "", [DEV_MOUNT, *(mounts if has_tree else [])], limits)


def gridd(settings: ClassSettings, part: Part, licence_secret: str) -> Container:
    """Return the sidecar with the licence daemon; as a native sidecar, it lets Jobs end."""
    has_tree = settings.driver is not None
    mounts = [TREE_MOUNT, VolumeMount(name=DRIVER, mount_path="/etc/nvidia", sub_path="etc/nvidia", read_only=True)]
    token = [VolumeMount(name=LICENCE, mount_path=TOKEN, read_only=True)] if licence_secret else []
    all_mounts = [DEV_MOUNT, *(mounts if has_tree else []), *token]
    return _container(GRIDD, part, TREE if has_tree else "", all_mounts, {}, restart_policy="Always")


def _container(
    name: str,
    part: Part,
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
