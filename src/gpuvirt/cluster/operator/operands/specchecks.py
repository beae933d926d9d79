"""What a policy may not say, beyond the types of its fields.

The API server refuses the same where our CustomResourceDefinition is installed, with the same words; where NVIDIA's is,
this is what tells it. Images are looked at when their operands are rendered.
"""

import re
from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import Spec, SpecFault
from gpuvirt.cluster.kinds.vmoperands import SandboxMode

UNAVAILABLE = "^([1-9][0-9]*|([1-9][0-9]?|100)%)?$"
"""A pattern in the syntax of both Python and RE2."""
NO_KATA = "mode kata can't be served yet: virtual machines are KubeVirt's; set mode to kubevirt, or leave it out"
NRI_NEEDS = (
    "cdi.nriPluginEnabled needs cdi.enabled and toolkit.enabled; set both to true, or leave nriPluginEnabled out"
)
NOT_A_SHARE = "expected a number of nodes, as 1, or a share of them, as 10%, and more than none"


def spec_faults(spec: Spec) -> Iterator[SpecFault]:
    """Yield what is wrong with a spec, each with its place."""
    if spec.sandbox_workloads.mode is SandboxMode.KATA:
        yield SpecFault("$.spec.sandboxWorkloads.mode", NO_KATA)
    if spec.cdi.nri_plugin_enabled is True and False in {spec.cdi.enabled, spec.toolkit.enabled}:
        yield SpecFault("$.spec.cdi.nriPluginEnabled", NRI_NEEDS)
    paths = spec.host_paths
    for name, path in (
        ("rootFS", paths.root_fs),
        ("driverInstallDir", paths.driver_install_dir),
        ("kubeletRootDir", paths.kubelet_root_dir),
    ):
        if path and (not path.startswith("/") or ".." in path.split("/")):
            yield SpecFault(f"$.spec.hostPaths.{name}", f"expected an absolute path without .., got {path}")
    rolling = spec.daemonsets.rolling_update
    if rolling is not None and not is_share(rolling.max_unavailable):
        yield SpecFault("$.spec.daemonsets.rollingUpdate.maxUnavailable", NOT_A_SHARE)


def is_share(text: str) -> bool:
    """Return whether a text says how many nodes at once, or nothing."""
    return re.fullmatch(UNAVAILABLE, text) is not None
