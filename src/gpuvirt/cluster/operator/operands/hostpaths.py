"""Paths on the hosts, which the policy may set, and volumes, mounts and variables that several operands share."""

from gpuvirt.cluster.kinds.clusterpolicy import HostPaths
from gpuvirt.cluster.kinds.podparts import (
    ConfigMapSource,
    EnvSource,
    EnvVar,
    FieldReference,
    HostPathSource,
    SecurityContext,
    SeLinuxOptions,
    Volume,
    VolumeMount,
)

VALIDATIONS = "/run/nvidia/validations"
DRIVER_DIR = "/run/nvidia/driver"
KUBELET = "/var/lib/kubelet"
INTO, BOTH = "HostToContainer", "Bidirectional"
FOLDER, ANY_FOLDER = "Directory", "DirectoryOrCreate"
PRIVILEGED = SecurityContext(privileged=True)
PRIVILEGED_S0 = SecurityContext(privileged=True, se_linux_options=SeLinuxOptions(level="s0"))
NODE_NAME = EnvVar(name="NODE_NAME", value_from=EnvSource(field_ref=FieldReference(field_path="spec.nodeName")))


def root_of(paths: HostPaths) -> str:
    """Return the root folder of the host."""
    return paths.root_fs or "/"


def driver_of(paths: HostPaths) -> str:
    """Return the path on the host of the driver container's root."""
    return paths.driver_install_dir or DRIVER_DIR


def kubelet_of(paths: HostPaths) -> str:
    """Return the kubelet's root folder."""
    return (paths.kubelet_root_dir or KUBELET).rstrip("/") or "/"


def field_of(name: str, path: str) -> EnvVar:
    """Return an environment variable with the value of a field of the pod."""
    return EnvVar(name=name, value_from=EnvSource(field_ref=FieldReference(field_path=path)))


def host(name: str, path: str, kind: str = "") -> Volume:
    """Return a volume for a file or folder of the host."""
    return Volume(name=name, host_path=HostPathSource(path=path, type=kind))


def files(name: str, config_map: str, mode: int | None = None) -> Volume:
    """Return a volume with the entries of a ConfigMap as files."""
    return Volume(name=name, config_map=ConfigMapSource(name=config_map, default_mode=mode))


def mount(name: str, at: str, propagation: str = "", *, read_only: bool = False, part: str = "") -> VolumeMount:
    """Return the mount of a volume in a container."""
    return VolumeMount(name=name, mount_path=at, mount_propagation=propagation, read_only=read_only, sub_path=part)
