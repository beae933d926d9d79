"""The reports of nvidia-smi on the GPUs of one node, kept until the driver may have changed the reported values."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler, SmiReport
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.scheduling import SchedulerContext, SchedulerReport


class SmiMemory(msgspec.Struct, frozen=True):
    """The reports of nvidia-smi on the GPUs of one node."""

    reports: Mapping[PciAddress, tuple[DesiredVgpus, SmiReport]] = msgspec.field(default_factory=dict)
    """Each report with the desired vGPUs for which it was asked."""
    schedulers: Mapping[PciAddress, SchedulerReport] = msgspec.field(default_factory=dict)
    """The reported schedulers of GPUs whose vGPUs share time; a report is dropped when its context changes."""

    def with_report(
        self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, context: SchedulerContext | None, at_s: float
    ) -> "SmiMemory":
        """Return the memory with a report on a GPU, which was read for these desired vGPUs."""
        found = replace(self, reports={**self.reports, gpu: (vgpus, report)})
        if report.scheduler is None or context is None:
            return found
        return found.with_scheduler(gpu, SchedulerReport(report.scheduler, context, at_s))

    def with_scheduler(self, gpu: PciAddress, report: SchedulerReport) -> "SmiMemory":
        """Return the memory with a report on a GPU's scheduler, also for the GPU's plan."""
        planned, reports = self.reports.get(gpu), self.reports
        if planned is not None and planned[1].scheduler is not None and isinstance(report.scheduler, Scheduler):
            reports = {**reports, gpu: (planned[0], replace(planned[1], scheduler=report.scheduler))}
        return SmiMemory(reports, {**self.schedulers, gpu: report})

    def without(self, gpu: PciAddress) -> "SmiMemory":
        """Return the memory without the reports on a GPU, since they may be outdated."""
        reports, schedulers = dict(self.reports), dict(self.schedulers)
        reports.pop(gpu, None)
        schedulers.pop(gpu, None)
        return SmiMemory(reports, schedulers)

    def of_contexts(self, contexts: Mapping[PciAddress, SchedulerContext]) -> "SmiMemory":
        """Return the memory without the reports on schedulers of other contexts than these."""
        kept = {gpu: report for gpu, report in self.schedulers.items() if report.scheduler_context == contexts.get(gpu)}
        return self if kept == self.schedulers else replace(self, schedulers=kept)
