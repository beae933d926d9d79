"""The agent's metrics page: the NodeView and the agent's counters."""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.shares.node.memoryregion import MemoryUses, UnreadableUse
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.web.exposition import counter, gauge, histograms, text_of

HEALTHY = "healthy"
UNHEALTHY = "unhealthy"
NOT_OFFERED = "not-offered"


class ShareFigures(msgspec.Struct, frozen=True):
    """The shares of a node."""

    records: ShareRecords = msgspec.field(default_factory=ShareRecords)
    """The pods with units of shared GPUs."""
    refused: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """The number of refused shares by step and code."""
    used: MemoryUses = msgspec.field(default_factory=dict)
    """The memory that containers use, by their own reports."""


NO_SHARES = ShareFigures()


def page(view: NodeView, telemetry: Telemetry, shares: ShareFigures | None = None) -> str:
    """Return the page in Prometheus' text format."""
    shares = shares or NO_SHARES
    return text_of(
        _gpus(view),
        _schedulers(view),
        _timeslices(view),
        _resources(view),
        _registered(view),
        _problems(view),
        _invalid(view),
        _conditions(view),
        _units(view),
        _units_used(shares.records),
        _limits(shares.records),
        _memory_used(shares),
        counter(
            "gpuvirt_shares_refused_total",
            "Refused shares by the kubelet's call and the code of the reason.",
            ("step", "reason"),
            shares.refused.items(),
        ),
        *_counted(telemetry),
        _info(view),
    )


def _counted(telemetry: Telemetry) -> Iterator[Iterator[str]]:
    """Yield the metrics that count from the start of the agent."""
    yield counter(
        "gpuvirt_allocations_total",
        "Allocate calls by outcome: given, or the code of the refusal's reason.",
        ("resource", "outcome"),
        telemetry.allocations.items(),
    )
    yield histograms(
        "gpuvirt_allocate_seconds", "Duration of successful Allocate calls.", (), [((), telemetry.allocate_s)]
    )
    yield counter(
        "gpuvirt_registrations_total",
        "Registrations at the kubelet by outcome.",
        ("resource", "outcome"),
        telemetry.registrations.items(),
    )
    yield counter(
        "gpuvirt_host_scans_total",
        "Observations of the host by depth and cause.",
        ("depth", "cause"),
        telemetry.observations.items(),
    )
    yield counter(
        "gpuvirt_gpu_changes_total",
        "Changes of GPUs by desired state and outcome: done, or the code of the reason of the failure.",
        ("desired", "outcome"),
        telemetry.gpu_changes.items(),
    )


def _gpus(view: NodeView) -> Iterator[str]:
    """Count GPUs and vGPUs by mode, health, and their first reason."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for gpu in view.gpus:
        health = NOT_OFFERED if gpu.healthy is None else HEALTHY if gpu.healthy else UNHEALTHY
        counts[str(gpu.mode), health, str(gpu.reasons[0].code) if gpu.reasons else ""] += 1
        for vgpu in gpu.vgpus:
            health = NOT_OFFERED if vgpu.offered_as is None else UNHEALTHY if vgpu.reasons else HEALTHY
            counts[f"{gpu.mode}-device", health, str(vgpu.reasons[0].code) if vgpu.reasons else ""] += 1
    yield from gauge(
        "gpuvirt_devices",
        "GPUs and vGPUs (mode vgpu-device) by mode, health, and the first reason against them.",
        ("mode", "health", "reason"),
        counts.items(),
    )


def _schedulers(view: NodeView) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_vgpu_scheduler",
        "1 for the scheduling policy of a GPU's vGPUs, where it is known.",
        ("gpu", "policy"),
        [((gpu.address, str(gpu.scheduler.policy)), 1) for gpu in view.gpus if gpu.scheduler is not None],
    )


def _timeslices(view: NodeView) -> Iterator[str]:
    slices_ms = {gpu.address: gpu.scheduler.timeslice_ms for gpu in view.gpus if gpu.scheduler is not None}
    yield from gauge(
        "gpuvirt_vgpu_timeslice_seconds",
        "The time slice of a GPU's vGPUs, where the policy has one and it is known.",
        ("gpu",),
        [((gpu,), timeslice_ms / 1000) for gpu, timeslice_ms in slices_ms.items() if timeslice_ms is not None],
    )


def _resources(view: NodeView) -> Iterator[str]:
    counts = {
        (resource.name, health): float(sum(device.healthy is (health == HEALTHY) for device in resource.devices))
        for resource in view.resources
        for health in (HEALTHY, UNHEALTHY)
    }
    yield from gauge(
        "gpuvirt_resource_devices",
        "Devices that the agent lists to the kubelet, by health.",
        ("resource", "health"),
        counts.items(),
    )
    allocated = {
        (resource.name,): float(sum(device.allocated_to is not None for device in resource.devices))
        for resource in view.resources
    }
    text = "Devices that are allocated to pods."
    yield from gauge("gpuvirt_resource_devices_allocated", text, ("resource",), allocated.items())


def _registered(view: NodeView) -> Iterator[str]:
    registered = {
        (resource.name, str(resource.not_registered_because.code) if resource.not_registered_because else ""): float(
            resource.registered
        )
        for resource in view.resources
    }
    yield from gauge(
        "gpuvirt_resource_registered",
        "1 if the resource is registered at the kubelet.",
        ("resource", "reason"),
        registered.items(),
    )


def _problems(view: NodeView) -> Iterator[str]:
    counts = Counter((str(problem.code),) for problem in view.problems)
    yield from gauge("gpuvirt_problems", "Problems of the node or the agent, by code.", ("reason",), counts.items())


def _invalid(view: NodeView) -> Iterator[str]:
    counts = Counter((str(value.origin), str(value.reason.code)) for value in view.invalid)
    yield from gauge(
        "gpuvirt_desired_state_invalid",
        "Invalid values of the desired state, by origin and code.",
        ("origin", "reason"),
        counts.items(),
    )


def _units(view: NodeView) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_shared_gpu_units",
        "Units of a GPU in mode shared that pods can get; 0 if they are withheld.",
        ("gpu",),
        [((gpu.id,), float(gpu.offered)) for gpu in view.shared.gpus if gpu.id is not None],
    )


def _units_used(shares: ShareRecords) -> Iterator[str]:
    used: Counter[tuple[str, str]] = Counter()
    for pod in shares.pods.values():
        for gpu, units in pod.placement.used.items():
            used[gpu, pod.namespace] += units
    text = "Units of a GPU that the pods of a namespace have."
    yield from gauge("gpuvirt_shared_gpu_units_used", text, ("gpu", "namespace"), used.items())


def _limits(shares: ShareRecords) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_share_memory_limit_bytes",
        "The memory that a container with part of a GPU can use, where shares are limits.",
        ("gpu", "namespace", "pod", "container", "enforcement"),
        [
            ((gpu, pod.namespace, pod.name, name, share.limit.by), float(share.limit.memory_mib << 20))
            for pod in shares.pods.values()
            for name, share in pod.containers.items()
            if share.limit is not None
            for gpu in share.gpus
        ],
    )


def _memory_used(shares: ShareFigures) -> Iterator[str]:
    yield from gauge(
        "gpuvirt_share_memory_used_bytes",
        "The memory that a container with a limit uses, as its own processes or NVIDIA's driver count it; no value"
        " while it is unknown, or no process has used the GPU.",
        ("gpu", "namespace", "pod", "container", "enforcement"),
        [
            ((gpu, pod.namespace, pod.name, name, share.limit.by), float(used))
            for uid, pod in shares.records.pods.items()
            for name, share in pod.containers.items()
            if share.limit is not None and isinstance(used := shares.used.get((uid, name)), int)
            for gpu in share.gpus
        ],
    )
    yield from gauge(
        "gpuvirt_share_memory_unknown",
        "1 for a container with a limit whose use of memory can't be read; the log says why.",
        ("namespace", "pod", "container"),
        [
            ((pod.namespace, pod.name, name), 1.0)
            for uid, pod in shares.records.pods.items()
            for name in pod.containers
            if isinstance(shares.used.get((uid, name)), UnreadableUse)
        ],
    )


def _conditions(view: NodeView) -> Iterator[str]:
    values = {
        (str(condition.check), str(condition.reason.code) if condition.reason is not None else ""): float(
            condition.holds
        )
        for condition in view.conditions
        if condition.needed
    }
    yield from gauge(
        "gpuvirt_condition",
        "1 if a check of the node's workload holds: vfio-pci, vgpu-manager, vgpu-devices.",
        ("check", "reason"),
        values.items(),
    )


def _info(view: NodeView) -> Iterator[str]:
    version = view.agent.version if view.agent is not None else ""
    yield from gauge("gpuvirt_info", "The agent's version.", ("version",), [((version,), 1)])
