"""`gpuvirt controller`: the controller of a cluster."""

import asyncio
import os
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import address_of
from gpuvirt.controller.process import ControllerOptions, run_until_stopped
from gpuvirt.controller.schedulespart import SchedulesPart, load_schedules
from gpuvirt.controller.settings import ControllerSettings, SharedResource
from gpuvirt.distributions import MissingPartError
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import ObjectName, parse_object_name
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.desired.settings import parse_units_resource
from gpuvirt.model.shares.demand import WHOLE, Units

LeaderElect = Annotated[bool, typer.Option(help="Act only while this process holds the Lease gpuvirt-controller.")]
Coexist = Annotated[
    bool,
    typer.Option(
        "--coexist",
        envvar="GPUVIRT_COEXIST",
        help="Run beside NVIDIA's GPU operator: gpuvirt manages the nodes labelled for VMs, NVIDIA's operator the"
        " others.",
    ),
]
Kubevirt = Annotated[
    bool,
    typer.Option(
        envvar="GPUVIRT_KUBEVIRT", help="Add missing devices to KubeVirt's permitted devices, or only report them."
    ),
]
Image = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_IMAGE",
        metavar="IMAGE",
        help="gpuvirt's image, which agents run. Without it, the controller deploys nothing.",
    ),
]
ImagePullPolicy = Annotated[
    str, typer.Option(envvar="GPUVIRT_IMAGE_PULL_POLICY", metavar="POLICY", help="The image's pull policy.")
]
ImagePullSecret = Annotated[
    list[str] | None,
    typer.Option(
        envvar="GPUVIRT_IMAGE_PULL_SECRETS", metavar="NAME", help="A Secret to pull the image with; repeatable."
    ),
]
SharedResourceOption = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_SHARED_RESOURCE",
        metavar="NAME",
        help="The resource whose pods `gpuvirt extender` places: nvidia.com/vgpu. The controller then writes"
        " the ConfigMap gpuvirt-scheduler, and agents offer shared GPUs as this resource.",
    ),
]
SharedUnits = Annotated[
    int, typer.Option(envvar="GPUVIRT_SHARED_UNITS", min=1, max=10_000, help="The units of a whole shared GPU.")
]
LabelVgpuTypes = Annotated[
    bool,
    typer.Option(
        "--label-vgpu-types",
        envvar="GPUVIRT_LABEL_VGPU_TYPES",
        help="Run an unprivileged agent on each node for containers, which labels it with the type of its vGPUs.",
    ),
]
NamespaceSetsUid = Annotated[
    bool,
    typer.Option(
        "--namespace-sets-uid",
        envvar="GPUVIRT_NAMESPACE_SETS_UID",
        help="Set no UID for unprivileged pods: on OpenShift, their namespace sets it.",
    ),
]
Webhook = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_WEBHOOK",
        metavar="NAME",
        help="Service and configuration of `gpuvirt webhook`. The controller then issues and renews its certificate,"
        " the Secret NAME-cert, and makes the API server trust it.",
    ),
]
Schedules = Annotated[
    bool,
    typer.Option(
        "--schedules",
        envvar="GPUVIRT_SCHEDULES",
        help="Run the VgpuSchedules of this namespace: drain worker nodes, suspend and resume their VMs.",
    ),
]
Listen = Annotated[
    str, typer.Option(envvar="GPUVIRT_LISTEN", metavar="ADDRESS:PORT", help="Address of metrics and probes.")
]


def controller(  # noqa: PLR0913  one parameter an option
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
    leader_elect: LeaderElect = True,
    coexist: Coexist = False,
    kubevirt: Kubevirt = True,
    image: Image = "",
    image_pull_policy: ImagePullPolicy = "IfNotPresent",
    image_pull_secret: ImagePullSecret = None,
    shared_resource: SharedResourceOption = "",
    shared_units: SharedUnits = WHOLE,
    label_vgpu_types: LabelVgpuTypes = False,
    namespace_sets_uid: NamespaceSetsUid = False,
    webhook: Webhook = "",
    schedules: Schedules = False,
    listen: Listen = ":8080",
    log_format: options.LogFormatOption = LogFormat.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Run the controller, which deploys operands to GPU nodes.

    The ClusterPolicy and the nodes' labels decide what runs on which node. The controller runs until SIGTERM or SIGINT.
    Starting or stopping it changes no device: without a controller, agents keep the last desired state.
    """
    set_up(log_format, verbose=verbose)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    served = ControllerOptions(
        credentials=credentials,
        settings=ControllerSettings(
            namespace=apiserver.own_namespace(namespace, credentials),
            coexists=coexist,
            manages_kubevirt=kubevirt,
            image=image or None,
            pull_policy=image_pull_policy,
            pull_secrets=tuple(image_pull_secret or ()),
            shared=_shared(shared_resource, shared_units),
            labels_vgpu_types=label_vgpu_types,
            namespace_sets_uid=namespace_sets_uid,
            images={name: value for name, value in os.environ.items() if name.endswith("_IMAGE")},  # noqa: TID251
        ),
        elects=leader_elect,
        listen=address_of(listen),
        webhook=_webhook(webhook),
        schedules=_schedules() if schedules else None,
    )
    asyncio.run(run_until_stopped(served))


def _webhook(name: str) -> ObjectName | None:
    """Return the webhook's name, None without one; raise ConfigError."""
    try:
        return parse_object_name(name) if name else None
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--webhook") from error


def _schedules() -> SchedulesPart:
    """Return what runs VgpuSchedules; raise ConfigError if its distribution is missing."""
    try:
        return load_schedules()
    except MissingPartError as error:
        raise ConfigError(str(error), where="--schedules") from error


def _shared(name: str, units: int) -> SharedResource | None:
    """Return the resource of shared GPUs, None without a name; raise ConfigError."""
    try:
        return SharedResource(parse_units_resource(name), Units(units)) if name else None
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--shared-resource") from error
