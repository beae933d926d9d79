"""Checks of a policy's values, beyond the types of its fields.

gpuvirt's CustomResourceDefinition has the same rules and messages, so that the API server refuses such a policy. With
NVIDIA's definition only these checks find it. Images are checked when operands are rendered.
"""

import re
from collections.abc import Iterator

from gpuvirt.kube.kinds.clusterpolicy import Spec, SpecFault

UNAVAILABLE = "^([1-9][0-9]*|([1-9][0-9]?|100)%)?$"
"""A pattern in the syntax of both Python and RE2."""
NRI_NEEDS = (
    "cdi.nriPluginEnabled needs cdi.enabled and toolkit.enabled; set both to true, or leave nriPluginEnabled out"
)
NOT_A_SHARE = "expected a number of nodes, as 1, or a share of all nodes, as 10%; 0 is not allowed"


def spec_faults(spec: Spec) -> Iterator[SpecFault]:
    """Yield the faults of a spec, each with its path."""
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
    """Return whether a text is empty, a number of nodes, or a share of all nodes."""
    return re.fullmatch(UNAVAILABLE, text) is not None
