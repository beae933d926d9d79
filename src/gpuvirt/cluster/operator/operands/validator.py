"""The validator of nodes for containers, with gpuvirt's image. Its checks write the files that operands wait for.

Contract: NVIDIA's validator: `driver-ready`, `toolkit-ready` and `plugin-ready`. CUDA is not checked, since that needs
a program of NVIDIA's and no operand waits for `cuda-ready`.
"""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.operandparts import EnvVar as PolicyVariable
from gpuvirt.cluster.kinds.podparts import Container, EnvVar, PodSpec, ResourceNeeds, Volume
from gpuvirt.cluster.kinds.vmoperands import Validator
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.operands import assembly, containernodes, hostpaths
from gpuvirt.cluster.operator.operands.driver import STARTED, has_driver
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, BOTH, INTO, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site

SERVICE_ACCOUNT = "nvidia-operator-validator"
OWN_NEEDS = ResourceNeeds(requests={"cpu": "1m", "memory": "32Mi"}, limits={"memory": "128Mi"})
SEES_GPUS = (
    EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="all"),
    EnvVar(name="NVIDIA_DRIVER_CAPABILITIES", value="utility"),
)


def validator(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the validator's DaemonSet."""
    desired = policy.spec.validator
    if not containernodes.is_desired(site, desired):
        return
    pod = PodSpec(
        service_account_name=SERVICE_ACCOUNT,
        node_selector=containernodes.selector("operator-validator"),
        runtime_class_name=containernodes.runtime_class_of(policy),
        host_network=assembly.on_host_network(desired),
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, desired),
        init_containers=tuple(validation(policy, site, what) for what in ("driver", "toolkit", "plugin")),
        containers=(_idle_container(policy, site),),
        volumes=_volumes(policy),
    )
    # This container looks for the nvidia-smi that the toolkit injects.
    annotations = containernodes.sees_gpus(policy, "toolkit-validation")
    yield assembly.daemon_set(policy, site, assembly.Draft(OperandName.VALIDATOR, pod, annotations=annotations))


def validation(policy: ClusterPolicy, site: Site, what: str) -> Container:
    """Return a container that waits until a component (`driver`) is ready and then writes its file."""
    desired, paths = policy.spec.validator, policy.spec.host_paths
    own = (
        *(SEES_GPUS if what == "toolkit" else (containernodes.NO_GPUS,)),
        hostpaths.NODE_NAME,
        EnvVar(name="GPUVIRT_SYSTEM_ROOT", value="/host"),
        EnvVar(name="GPUVIRT_DRIVER_DIR", value=hostpaths.driver_of(paths)),
        # A driver that is being installed has nvidia-smi before the driver works.
        EnvVar(name="GPUVIRT_DRIVER_STARTED", value=STARTED if has_driver(policy, site) else ""),
    )
    seen = (
        mount("driver-install-dir", hostpaths.DRIVER_DIR, INTO),
        mount("host-root", "/host", INTO, read_only=True),
    )
    return Container(
        name=f"{what}-validation",
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("validate", what, "--wait"),
        env=assembly.environment(own, (*desired.env, *_env_of(desired, what))),
        resources=assembly.resources_of(desired.resources, OWN_NEEDS),
        security_context=hostpaths.PRIVILEGED_S0,
        volume_mounts=(
            mount("run-nvidia-validations", hostpaths.VALIDATIONS, BOTH),
            *(seen if what == "driver" else ()),
        ),
    )


def _env_of(desired: Validator, what: str) -> tuple[PolicyVariable, ...]:
    return {"driver": desired.driver, "toolkit": desired.toolkit, "plugin": desired.plugin}[what].env


def _idle_container(policy: ClusterPolicy, site: Site) -> Container:
    return Container(
        name=SERVICE_ACCOUNT,
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("validate", "rest"),
        env=(containernodes.NO_GPUS,),
        resources=assembly.resources_of(policy.spec.validator.resources, OWN_NEEDS),
        security_context=hostpaths.PRIVILEGED_S0,
        volume_mounts=(mount("run-nvidia-validations", hostpaths.VALIDATIONS, BOTH),),
    )


def _volumes(policy: ClusterPolicy) -> tuple[Volume, ...]:
    paths = policy.spec.host_paths
    return (
        host("run-nvidia-validations", hostpaths.VALIDATIONS, ANY_FOLDER),
        host("driver-install-dir", hostpaths.driver_of(paths), ANY_FOLDER),
        host("host-root", hostpaths.root_of(paths)),
    )
