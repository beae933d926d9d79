"""The fields of a SecurityContextConstraints of OpenShift that refuse a pod, by the rules of OpenShift's admission."""

from collections.abc import Iterator

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import Manifest, at, items

RESTRICTED: Manifest = {
    "allowPrivilegedContainer": False,
    "allowPrivilegeEscalation": False,
    "allowHostDirVolumePlugin": False,
    "allowHostPID": False,
    "allowHostIPC": False,
    "allowHostNetwork": False,
    "allowHostPorts": False,
    "readOnlyRootFilesystem": False,
    "requiredDropCapabilities": ["ALL"],
    "runAsUser": {"type": "MustRunAsRange"},
    "seLinuxContext": {"type": "MustRunAs"},
    "seccompProfiles": ["runtime/default"],
    "volumes": ["configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "projected", "secret"],
}
"""The SCC restricted-v2, which OpenShift has for all accounts."""
OF_THE_HOST = {"hostPID": "allowHostPID", "hostIPC": "allowHostIPC", "hostNetwork": "allowHostNetwork"}


def refusals(scc: Manifest, pod: Plain) -> set[str]:
    """Return the fields of an SCC that refuse a pod; an empty set: the pod is admitted."""
    return set(_of_pod(scc, pod)) | {field for container in _containers(pod) for field in _of(scc, pod, container)}


def _containers(pod: Plain) -> list[Plain]:
    return [*items(at(pod, "initContainers")), *items(at(pod, "containers"))]


def _of_pod(scc: Manifest, pod: Plain) -> Iterator[str]:
    for requested, permitted in OF_THE_HOST.items():
        if at(pod, requested) is True and scc[permitted] is not True:
            yield permitted
    kinds = {key for item in items(at(pod, "volumes")) if isinstance(item, dict) for key in item if key != "name"}
    # The token of the pod's account is a projected volume.
    if not kinds | {"projected"} <= set(map(str, items(at(scc, "volumes")))):
        yield "volumes"
    if "hostPath" in kinds and scc["allowHostDirVolumePlugin"] is not True:
        yield "allowHostDirVolumePlugin"


def _of(scc: Manifest, pod: Plain, container: Plain) -> Iterator[str]:
    def setting(*steps: str) -> Plain:
        own = at(container, "securityContext", *steps)
        return own if own is not None else at(pod, "securityContext", *steps)

    if setting("privileged") is True:
        if scc["allowPrivilegedContainer"] is not True:
            yield "allowPrivilegedContainer"
    elif setting("allowPrivilegeEscalation") is not False and scc["allowPrivilegeEscalation"] is not True:
        yield "allowPrivilegeEscalation"
    if at(pod, "hostNetwork") is True and items(at(container, "ports")) and scc["allowHostPorts"] is not True:
        yield "allowHostPorts"
    # A range is the namespace's, and its values are not known when a manifest is written.
    if setting("runAsUser") is not None and at(scc, "runAsUser", "type") == "MustRunAsRange":
        yield "runAsUser"
    if setting("seLinuxOptions") is not None and at(scc, "seLinuxContext", "type") == "MustRunAs":
        yield "seLinuxContext"
    if scc["readOnlyRootFilesystem"] is True and setting("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem"
    profile = setting("seccompProfile", "type")
    if items(at(scc, "seccompProfiles")) != ["*"] and profile not in {None, "RuntimeDefault"}:
        yield "seccompProfiles"
