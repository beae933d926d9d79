"""Rolls back the vGPUs of a GPU whose change has failed: the same vGPUs, with the same ids, in the same mode."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import CreateVgpu, RollBack
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import plan_gpu
from gpuvirt.model.desired.vgpuentries import Sizes
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.observation import Learned, Observation, observe_unit
from gpuvirt.node.change.steps.leasing import RefusedError
from gpuvirt.node.change.steps.vgpusteps import MOST_ROUNDS, Run, take_all


def put_back(last: Observation, gpu: PciAddress, before: GpuState | None, run: Run) -> Iterator[Reason]:
    """Bring a GPU back to the vGPUs that it carried before; yield why that failed.

    Only vGPUs that the change has created are removed. A change that the kernel has blocked is not rolled back, since
    the former vGPUs may no longer be desired: the next plan starts from the vGPUs that exist.
    """
    if not run.taken or run.change.expired:
        return
    run.report(RollBack(gpu))
    run.change.roll_back()
    if before is None:
        return
    created = {step.vgpu for step in run.taken if isinstance(step, CreateVgpu)}
    desired = DesiredVgpus(Counter(before.types.values()), _sizes(before))
    for _ in range(MOST_ROUNDS):
        unit = last.inventory.gpus[gpu].unit
        seen = observe_unit(last.site, last.inputs, unit, last.inventory, [gpu])
        if gpu not in seen.inventory.gpus:  # the outcome of the change says so
            return
        run.change.plan_from(seen.inventory, seen.account.allocations.unmapped)
        others = {name for name, vgpu in seen.inventory.vgpus.items() if vgpu.gpu == gpu and name not in created}
        learned = Learned(remembered=before.types, in_use=dict.fromkeys(others, "a program other than this change"))
        state = replace(seen, learned={gpu: learned}).asked_state(gpu, desired)
        back = plan_gpu(seen.inventory.facts.functions[gpu], state, desired)
        if not back.steps:
            yield from back.refusals
            return
        try:
            take_all(last.site, seen.inventory, state, back, run)
        except RefusedError as error:
            yield error.reason
            return


def _sizes(before: GpuState) -> Sizes | None:
    mixed = before.smi.modes.mixed_sizes if before.smi is not None else None
    if not isinstance(mixed, bool):
        return None
    return Sizes.MIXED if mixed else Sizes.EQUAL
