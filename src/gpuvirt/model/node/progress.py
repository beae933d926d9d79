"""The progress of a node's GPUs toward their desired state, as reported to the cluster."""

from collections.abc import Iterator, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NOTHING_DESIRED, NodeRequest, Progress, StateName
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node.decisions import NodeDecisions
from gpuvirt.model.node.desirednode import DesiredNode
from gpuvirt.model.node.picture import NodePicture
from gpuvirt.model.reasons import Reason, reasons_text

Outcomes = Mapping[UnitId, Outcome]


def of_workload(
    picture: NodePicture, decided: NodeDecisions, outcomes: Outcomes, *, drivers_differ: bool
) -> Progress | None:
    """Return the progress of the desired drivers; None while it is unknown whether the cluster sets them.

    A GPU that is used whole must not carry vGPUs either, and one for vGPUs on demand must be able to.
    """
    if picture.inventory is None:
        return None
    if not decided.memory.desired.follows_cluster:
        return NOTHING_DESIRED if picture.request is not None and picture.request.spec is not None else None
    if decided.invalid.modes:
        return Progress(StateName.FAILED, reasons_text([invalid.reason for invalid in decided.invalid.modes]))
    units = decided.desired.by_unit(picture.inventory).values()
    unable = {gpu for gpu, found in picture.inventory.gpus.items() if found.vgpu_host is None}
    concerned = {
        gpu
        for desired in units
        for gpu, target in desired.items()
        if target.is_whole or (target.vgpus is not None and target.vgpus.on_demand and gpu in unable)
    }
    reasons = tuple(dict.fromkeys(_against_workload(outcomes, concerned)))
    if not drivers_differ and not reasons:
        return Progress(StateName.SUCCESS)
    failed = any(not reason.code.passes for reason in reasons)
    return Progress(StateName.FAILED if failed else StateName.PENDING, reasons_text(reasons))


def _against_workload(outcomes: Outcomes, gpus: set[PciAddress]) -> Iterator[Reason]:
    for outcome in outcomes.values():
        yield from outcome.drivers
        for gpu, reasons in outcome.vgpus.items():
            if gpu in gpus:
                yield from reasons


def of_vgpus(picture: NodePicture, decided: NodeDecisions, outcomes: Outcomes) -> Progress | None:
    """Return the progress of the desired vGPUs; None while it is unknown which are desired."""
    vgpus = decided.desired.vgpus
    target = vgpus.desired_types
    if picture.inventory is None:
        return None
    if target.name is None:
        return NOTHING_DESIRED if _is_without_vgpus(picture.request, decided.memory.desired) else None
    if decided.invalid.vgpus:
        return Progress(StateName.FAILED, reasons_text([invalid.reason for invalid in decided.invalid.vgpus]))
    if target.undecided:
        return Progress(StateName.PENDING, "; ".join(note.text for note in target.undecided))
    units = decided.desired.by_unit(picture.inventory).values()
    desired = {gpu: gpu_desired for unit in units for gpu, gpu_desired in unit.items()}
    carrying = [gpu for gpu, state in desired.items() if state.vgpus is not None and not state.is_whole]
    is_open = [gpu for gpu in carrying if vgpus.waits_for_smi(gpu) or not vgpus.plan_of(gpu).met]
    reasons = list(dict.fromkeys(_against_vgpus(vgpus, outcomes, frozenset(is_open))))
    if failures := [reason for reason in reasons if not reason.code.passes]:
        return Progress(StateName.FAILED, reasons_text(failures))
    return Progress(StateName.PENDING, reasons_text(reasons)) if is_open else Progress(StateName.SUCCESS)


def _is_without_vgpus(request: NodeRequest | None, desired: DesiredNode) -> bool:
    """Return whether the cluster is known to desire no vGPUs; an invalid mode leaves that open after a restart."""
    is_observed = request is not None and (request.has_spec or request.workload is not None)
    if not (desired.follows_cluster and is_observed) or desired.invalid_modes is not None:
        return False
    return DesiredMode.VGPU not in {desired.modes.default, *desired.modes.by_gpu.values()}


def _against_vgpus(vgpus: NodeVgpus, outcomes: Outcomes, gpus: frozenset[PciAddress]) -> Iterator[Reason]:
    """Yield what keeps these GPUs from their vGPUs, or from the native driver that vGPUs need."""
    for outcome in outcomes.values():
        waits = any(vgpus.plan_of(gpu).follows for gpu in gpus.intersection(outcome.vgpus))
        yield from outcome.drivers if waits else ()
        for gpu in gpus.intersection(outcome.vgpus):
            yield from outcome.vgpus[gpu]
