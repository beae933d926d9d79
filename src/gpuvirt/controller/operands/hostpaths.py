"""Paths on the hosts, which the policy may set, and volumes, mounts and variables that several operands share."""

from msgspec.structs import replace

from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, HostPaths
from gpuvirt.kube.kinds.podparts import EnvSource, EnvVar, FieldReference, HostPathSource, Volume, VolumeMount

DRIVER_DIR = "/run/nvidia/driver"
KUBELET = "/var/lib/kubelet"
"""The folders of the manifests, which the policy may set."""
ANY_FOLDER = "DirectoryOrCreate"


def root_of(paths: HostPaths) -> str:
    """Return the root folder of the host."""
    return paths.root_fs or "/"


def driver_of(paths: HostPaths) -> str:
    """Return the path on the host of the driver container's root."""
    return paths.driver_install_dir or DRIVER_DIR


def kubelet_of(paths: HostPaths) -> str:
    """Return the kubelet's root folder."""
    return (paths.kubelet_root_dir or KUBELET).rstrip("/") or "/"


def toolkit_of(policy: ClusterPolicy) -> str:
    """Return the folder of the host into which the container toolkit is installed."""
    return policy.spec.toolkit.install_dir or "/usr/local/nvidia"


def field_of(name: str, path: str) -> EnvVar:
    """Return an environment variable with the value of a field of the pod."""
    return EnvVar(name=name, value_from=EnvSource(field_ref=FieldReference(field_path=path)))


def moved(volume: Volume, paths: HostPaths) -> Volume:
    """Return a volume of a manifest at the policy's path: below the host's, the driver's or the kubelet's folder."""
    if volume.host_path is None:
        return volume
    path = volume.host_path.path
    chosen = root_of(paths) if path == "/" else path
    for usual, folder in ((DRIVER_DIR, driver_of(paths)), (KUBELET, kubelet_of(paths))):
        if f"{path}/".startswith(f"{usual}/"):
            chosen = folder + path.removeprefix(usual)
    return replace(volume, host_path=replace(volume.host_path, path=chosen))


def host(name: str, path: str, kind: str = "") -> Volume:
    """Return a volume for a file or folder of the host."""
    return Volume(name=name, host_path=HostPathSource(path=path, type=kind))


def mount(name: str, at: str, part: str) -> VolumeMount:
    """Return the mount of one file of a volume in a container."""
    return VolumeMount(name=name, mount_path=at, read_only=True, sub_path=part)
