"""The validator of nodes for containers (manifests/validator.yaml), with gpuvirt's image."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, containernodes, hostpaths, overlay
from gpuvirt.controller.operands.driver import has_driver
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest


def validator(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the validator's DaemonSet."""
    desired = policy.spec.validator
    if not containernodes.is_desired(inputs, desired):
        return
    found = validating(overlay.base(policy, inputs, "validator"), policy, inputs)
    # Arguments and variables are those of the checks, and the last container has none.
    found = overlay.configured(found, inputs, replace(desired, args=(), env=()))
    yield assembly.daemon_set(policy, inputs, found)


def validating(found: DaemonSet, policy: ClusterPolicy, inputs: RenderInputs) -> DaemonSet:
    """Return a manifest whose init containers, which are all checks of the validator, have the policy's settings."""
    desired = policy.spec.validator
    of_checks = {
        "driver-validation": desired.driver.env,
        "toolkit-validation": desired.toolkit.env,
        "plugin-validation": desired.plugin.env,
    }
    values = {"GPUVIRT_DRIVER_DIR": hostpaths.driver_of(policy.spec.host_paths)}
    if not has_driver(policy, inputs):
        values["GPUVIRT_DRIVER_STARTED"] = ""
    checks = (
        replace(
            check,
            env=assembly.environment(overlay.with_values(check.env, values), (*desired.env, *of_checks[check.name])),
            resources=assembly.resources_of(desired.resources, check.resources),
        )
        for check in bases.pod_of(found).init_containers
    )
    return bases.with_pod(found, init_containers=tuple(checks))
