"""The labels of each node, by which the operands of its workload run there.

Contract: the node labelling of NVIDIA's operator: `gpu.present`, and one `gpu.deploy.*` label for each component. A
value that is already set stays, since admins keep a component off a node with it. A program that pauses a component for
a change may die before it ends the pause. The controller ends such a pause once the program's pod no longer runs.
"""

from collections.abc import Mapping

import msgspec

from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.operands.images import os_tag
from gpuvirt.kube.labels import (
    AGENT,
    AGENT_GOES,
    AGENT_LABELS,
    ALL,
    MIG_CAPABLE_LABEL,
    MIG_CONFIG_LABEL,
    MIG_MANAGER,
    NODE_LABEL,
    OPERANDS_LABEL,
    OPERANDS_OFF_ANNOTATION,
    OS_LABEL,
    OS_SOURCES,
    PAUSED_FOR_DRIVER,
    PAUSED_FOR_VGPUS,
    PRESENT_LABEL,
    PRODUCT_LABEL,
    SETS,
    VGPU_DRIVER,
    VGPU_DRIVER_LABEL,
    VGPU_HOST_DRIVER_LABEL,
    WITH_VGPU_DRIVER,
    DesiredLabels,
    deploy_label,
)
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import Workload
from gpuvirt.shares.nodekeys import keys_without_agent

MIG_PRODUCTS = ("h100", "a100", "a30")

Labels = Mapping[str, str]


class LabelInputs(msgspec.Struct, frozen=True):
    """Facts beside the placement that decide a node's labels."""

    vgpus_change: bool = False
    """Whether a program runs on the node that pauses other operands while vGPUs change."""
    driver_changes: bool = False
    """Whether a program runs on the node that pauses other operands while it changes the driver."""
    mig_default: str | None = None
    """The MIG config for nodes without one; None if no component applies it."""
    runs_agent: bool = True
    """Whether the agent runs on nodes for VMs."""
    labels_vgpu_types: bool = False
    """Whether an agent runs on nodes for containers, for the label of the vGPU type."""


def desired_labels(metadata: Metadata, placement: NodePlacement, inputs: LabelInputs) -> DesiredLabels:
    """Return a node's desired labels, including those that it already has."""
    labels = metadata.labels
    desired: dict[str, str | None] = {}
    if not placement.present:
        if labels.get(PRESENT_LABEL) == "true":
            desired[PRESENT_LABEL] = "false"
        return DesiredLabels(desired | _without_all(labels, placement))
    desired |= {PRESENT_LABEL: "true", **_os(labels)}
    if labels.get(OPERANDS_LABEL) == "false":
        return DesiredLabels(desired | _without_all(labels, placement))
    if placement.workload is None:
        healed = _healed(labels, inputs)
        return DesiredLabels(desired | healed | _agent(healed, inputs))
    if placement.leaving:
        kept = _healed(labels, inputs) | _vgpu_driver(labels, placement, inputs)
        return DesiredLabels(desired | kept | {NODE_LABEL: _agent_of_leaving(placement, inputs)})
    deploy = {} if placement.other_plugin else _deploy(labels, placement.workload, inputs)
    desired |= deploy | _agent(deploy, inputs)
    if placement.workload is Workload.CONTAINER and inputs.labels_vgpu_types:
        desired[NODE_LABEL] = AGENT_LABELS
    if deploy and placement.workload is Workload.CONTAINER and inputs.mig_default and _mig_capable(labels):
        desired[MIG_CONFIG_LABEL] = labels.get(MIG_CONFIG_LABEL) or inputs.mig_default
    return DesiredLabels(desired)


def desired_labels_beside(metadata: Metadata, placement: NodePlacement, inputs: LabelInputs) -> DesiredLabels:
    """Return a node's desired labels beside NVIDIA's operator, which they keep off the nodes for VMs."""
    labels, ours = metadata.labels, metadata.annotations.get(OPERANDS_OFF_ANNOTATION) == "true"
    vms = placement.present and placement.workload in {Workload.PASSTHROUGH, *WITH_VGPU_DRIVER}
    was_ours = ours or labels.get(NODE_LABEL) == "true"
    leaving = was_ours and (placement.workload is None or bool(placement.leaving))
    used = placement.workload in WITH_VGPU_DRIVER or placement.vgpus_used
    driver = (was_ours and placement.leaves_vgpus) or (
        (used or bool(placement.leaving)) and (vms or VGPU_DRIVER_LABEL in labels)
    )
    if vms or leaving:
        desired: dict[str, str | None] = {
            NODE_LABEL: _agent_of_leaving(placement, inputs),
            VGPU_DRIVER_LABEL: "true" if driver else None,
            OPERANDS_LABEL: "false",
            **_os(labels),
        }
        off: dict[str, str | None] = {OPERANDS_OFF_ANNOTATION: "true"} if labels.get(OPERANDS_LABEL) != "false" else {}
        return DesiredLabels(desired, off)
    gone = (VGPU_DRIVER_LABEL, *((OPERANDS_LABEL,) if ours else ()))
    # NVIDIA's operands serve containers on a node that shares its GPUs, so they stay there beside the agent.
    shares = placement.present and placement.workload is Workload.SHARED
    agent = _agent_of_leaving(placement, inputs) if shares else None
    if placement.counts and placement.workload is Workload.CONTAINER and inputs.labels_vgpu_types:
        agent = AGENT_LABELS
    return DesiredLabels({**dict.fromkeys(gone), NODE_LABEL: agent}, {OPERANDS_OFF_ANNOTATION: None})


def without_left_keys(keys: DesiredLabels, metadata: Metadata, *, agent_exists: bool) -> DesiredLabels:
    """Return the keys, with the removal of the keys of an agent that no longer runs on the node.

    Its own label is `false` until its pod is gone (`agent_exists`), so that the removal is final, and so that keys of
    an agent that gpuvirt's controller did not deploy stay.
    """
    now, left = metadata.labels.get(NODE_LABEL), keys_without_agent(metadata)
    runs, desired = {"true", AGENT_LABELS}, keys.labels.get(NODE_LABEL, now)
    if desired in runs or now not in runs | {AGENT_GOES} or not (left.labels or left.annotations):
        return keys
    if now in runs or agent_exists:
        return DesiredLabels(keys.labels | {NODE_LABEL: AGENT_GOES}, keys.annotations)
    return DesiredLabels(keys.labels | left.labels | {NODE_LABEL: None}, keys.annotations | left.annotations)


def removed_labels(metadata: Metadata, *, beside: bool = False) -> DesiredLabels:
    """Return the labels to remove when gpuvirt is uninstalled; `beside`: the labels of NVIDIA's operator stay."""
    ours = metadata.annotations.get(OPERANDS_OFF_ANNOTATION) == "true"
    own = (NODE_LABEL, OS_LABEL, VGPU_DRIVER_LABEL, *((OPERANDS_LABEL,) if ours else ()))
    theirs = () if beside else (PRESENT_LABEL, *(label for label in metadata.labels if label in ALL))
    return DesiredLabels(dict.fromkeys((*own, *theirs)), {OPERANDS_OFF_ANNOTATION: None})


def _os(labels: Labels) -> dict[str, str | None]:
    """Return the label with the tag of the node's operating system; nothing without source labels, so that it stays."""
    for identity, version in OS_SOURCES:
        if identity in labels and version in labels:
            return {OS_LABEL: os_tag(labels[identity], labels[version])}
    return {}


def _without_all(labels: Labels, placement: NodePlacement) -> dict[str, str | None]:
    """Return the removal of all operands' labels, but for that of a vGPU driver whose vGPUs VMs use."""
    kept = {deploy_label(VGPU_DRIVER)} if placement.vgpus_used else set[str]()
    return dict.fromkeys(label for label in (*labels, NODE_LABEL) if label in (ALL | {NODE_LABEL}) - kept)


def _deploy(labels: Labels, workload: Workload, inputs: LabelInputs) -> dict[str, str | None]:
    names = [*SETS[workload], *([MIG_MANAGER] if workload is Workload.CONTAINER and _mig_capable(labels) else [])]
    keys = [deploy_label(name) for name in names]
    gone: dict[str, str | None] = dict.fromkeys(label for label in labels if label in ALL and label not in keys)
    return gone | {key: _value(labels.get(key, ""), inputs) for key in keys}


def _healed(labels: Labels, inputs: LabelInputs) -> dict[str, str | None]:
    return {label: _value(value, inputs) for label, value in labels.items() if label in ALL}


def _vgpu_driver(labels: Labels, placement: NodePlacement, inputs: LabelInputs) -> dict[str, str | None]:
    """Return the label of the vGPU driver while GPUs carry vGPUs or have VFs, or do so again.

    A node that was never labelled for operands has a driver that gpuvirt did not deploy.
    """
    label = deploy_label(VGPU_DRIVER)
    if not placement.leaves_vgpus or ALL.isdisjoint(labels):
        return {}
    return {label: _value(labels.get(label, ""), inputs)}


def _value(value: str, inputs: LabelInputs) -> str:
    """Return the value of a component's label: the current one, without a pause whose program no longer runs."""
    if value == PAUSED_FOR_VGPUS and not inputs.vgpus_change:
        return "true"
    if value.endswith(PAUSED_FOR_DRIVER) and not inputs.driver_changes:
        return value.removesuffix(PAUSED_FOR_DRIVER).removesuffix("_") or "true"
    return value or "true"


def _agent(deploy: Mapping[str, str | None], inputs: LabelInputs) -> dict[str, str | None]:
    """Return the agent's label: the agent runs where the operand that it replaces would, also while that is paused."""
    runs = inputs.runs_agent and deploy.get(deploy_label(AGENT)) in {"true", PAUSED_FOR_VGPUS}
    return {NODE_LABEL: "true" if runs else None}


def _agent_of_leaving(placement: NodePlacement, inputs: LabelInputs) -> str | None:
    """Return the agent's label on a node that changes its workload; it also stays until the agent has reported."""
    return "true" if inputs.runs_agent or placement.is_unreported else None


def _mig_capable(labels: Labels) -> bool:
    if labels.get(VGPU_HOST_DRIVER_LABEL):
        return False
    if (capable := labels.get(MIG_CAPABLE_LABEL)) is not None:
        return capable == "true"
    product = labels.get(PRODUCT_LABEL, "").lower()
    return any(name in product for name in MIG_PRODUCTS)
