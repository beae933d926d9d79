"""The process of the controller: takes part in the election, leads while it is elected, and serves its pages."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random

import msgspec

from gpuvirt import __version__
from gpuvirt.clock import Clock, RealClock
from gpuvirt.controller.controller import Controller, ControllerDependencies
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.policy.status import verdict_of
from gpuvirt.controller.schedulespart import Schedules, SchedulesPart
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.controller.webhookcertificate.keeper import CertificateKeeper, CertificateNames
from gpuvirt.facts.ids import ObjectName, parse_namespace
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.election import CONTROLLER_LEASE, Candidacy, Election, new_identity
from gpuvirt.tasks import keep_going, until_stopped
from gpuvirt.web.exposition import CONTENT_TYPE, PageAnswer, counter, gauge, text_of
from gpuvirt.web.probes import Probes

# The controller's metrics page.
#
# The metrics `gpu_operator_...` are those of NVIDIA's operator, for its dashboards and alerts; the others are
# gpuvirt's.
READY, NOT_READY, NO_POLICY = 1, 0, -1
"""Values of `gpu_operator_reconciliation_status`; NVIDIA's operator also has -2, for its own failures."""


def page(controller: Controller | None, certificate: CertificateKeeper | None = None, more: Iterable[str] = ()) -> str:
    """Return the page; `controller` is None in a process that does not lead.

    `certificate` keeps the webhook's certificate, None if the controller does not. `more` has lines of other metrics.
    """
    leads = gauge("gpuvirt_controller_leads", "1 in the leading process.", (), [((), float(controller is not None))])
    info = gauge("gpuvirt_info", "The controller's version.", ("version",), [((__version__,), 1)])
    if controller is None or controller.decisions is None:
        return text_of(leads, info, more)
    writes = counter(
        "gpuvirt_controller_writes_total",
        "Writes to the API server, by outcome.",
        ("outcome",),
        [(("done",), controller.writes_done), (("failed",), controller.writes_failed)],
    )
    return text_of(leads, info, of_decisions(controller.decisions), writes, _certificate(certificate), more)


def _certificate(keeper: CertificateKeeper | None) -> Iterator[str]:
    if keeper is None:
        return
    yield from gauge(
        "gpuvirt_webhook_certificate_kept", "1 while the webhook's certificate is kept.", (), [((), not keeper.problem)]
    )
    if keeper.ends_s is not None:
        text = "When the webhook's certificate ends, in seconds since 1970."
        yield from gauge("gpuvirt_webhook_certificate_end_seconds", text, (), [((), keeper.ends_s)])


def of_decisions(decided: Decisions) -> Iterator[str]:
    """Yield the metrics of the last decisions."""
    status = NO_POLICY if not decided.policy else READY if verdict_of(decided.progress).ready else NOT_READY
    yield from gauge(
        "gpu_operator_reconciliation_status",
        "1 if the cluster is as the ClusterPolicy describes, 0 if it is not, -1 without a ClusterPolicy.",
        (),
        [((), status)],
    )
    yield from gauge("gpu_operator_gpu_nodes_total", "Nodes with GPUs.", (), [((), float(len(decided.nodes)))])
    nodes = Counter((str(node.workload or "unknown"), str(node.against is None).lower()) for node in decided.nodes)
    yield from gauge(
        "gpuvirt_nodes",
        "Nodes with GPUs, by workload and by whether they are ready.",
        ("workload", "ready"),
        nodes.items(),
    )
    yield from gauge(
        "gpuvirt_node_not_ready",
        "1 for each node that is not ready; its GpuNode has the reason.",
        ("node", "workload"),
        [((node.name, str(node.workload or "unknown")), 1) for node in decided.nodes if node.against is not None],
    )
    yield from gauge(
        "gpuvirt_operand_not_ready",
        "1 for each DaemonSet that is not ready; the ClusterPolicy has the reason.",
        ("operand",),
        [((operand.name,), 1) for operand in decided.operands if operand.against is not None],
    )
    yield from gauge(
        "gpuvirt_controller_reasons",
        "Reasons that stop the controller or make nodes not ready, and problems with KubeVirt.",
        ("reason",),
        [((code,), count) for code, count in Counter(_codes(decided)).items()],
    )
    invalid = Counter((value.node, value.origin, value.code) for value in decided.progress.invalid)
    yield from gauge(
        "gpuvirt_desired_state_invalid",
        "Invalid values of the desired state, by node (empty: the cluster), origin and code.",
        ("node", "origin", "reason"),
        invalid.items(),
    )


def _codes(decided: Decisions) -> Iterator[str]:
    yield from (str(problem.code) for problem in decided.progress.problems)
    yield from (str(code) for node in decided.nodes for code in node.codes)
    kubevirt = decided.progress.kubevirt
    if kubevirt is not None and not kubevirt.ready:
        yield kubevirt.reason


log = logging.getLogger(__name__)


class ControllerOptions(msgspec.Struct, frozen=True):
    """The options of the process."""

    credentials: Credentials
    settings: ControllerSettings
    elects: bool = True
    """Whether several controllers elect a leader; otherwise this one leads at once."""
    listen: tuple[str, int] | None = None
    webhook: ObjectName | None = None
    """The Service and the configuration of the admission webhook whose certificate the controller keeps."""
    schedules: SchedulesPart | None = None
    """Runs VgpuSchedules while this controller leads; None for a controller without them."""
    clock: Clock = msgspec.field(default_factory=RealClock)


class ControllerProcess:
    """The process of one controller, which leads whenever it is elected."""

    def __init__(self, options: ControllerOptions) -> None:
        random = Random()  # noqa: S311  it spreads controllers over time, and keeps no secrets
        self.term: Controller | None = None
        """The controller while this process leads; None while another process leads."""
        self._options = options
        client, clock = Client(options.credentials), options.clock
        candidacy = Candidacy(options.settings.namespace, CONTROLLER_LEASE, new_identity(random))
        self._election = Election(client, candidacy, clock, random)
        leading = client.leading(lambda: self._election.may_write or not options.elects, candidacy.terms.within_s)
        self._dependencies = ControllerDependencies(leading, clock, random)
        self.certificate: CertificateKeeper | None = None
        """Keeps the webhook's certificate while this process leads."""
        self._schedules: Schedules | None = None
        """The schedules while this process leads and runs them."""
        if options.webhook is not None:
            names = CertificateNames(parse_namespace(options.settings.namespace), options.webhook)
            self.certificate = CertificateKeeper(leading, names, clock)

    async def run(self) -> None:
        """Serve the pages and take part in the election until cancelled."""
        options = self._options
        async with asyncio.TaskGroup() as group:
            if options.listen is not None:
                host, port = options.listen
                probes = Probes(self.pages())
                group.create_task(keep_going("probes", lambda: probes.run(host, port), options.clock))
            group.create_task(self._election.run(self._lead) if options.elects else self._lead())

    async def _lead(self) -> None:
        settings, part = self._options.settings, self._options.schedules
        scheduled = part.scheduled_configs(settings.namespace) if part is not None else None
        self.term = Controller(self._dependencies, settings, scheduled)
        try:
            await self._run_term(self.term)
        finally:
            self.term = None

    async def _run_term(self, term: Controller) -> None:
        """Run the controller and its other tasks."""
        options = self._options
        async with asyncio.TaskGroup() as group:
            if self.certificate is not None:
                group.create_task(keep_going("webhook certificate", self.certificate.keep, options.clock))
            if (part := options.schedules) is not None:
                group.create_task(keep_going("schedules", lambda: self._run_schedules(part), options.clock))
            group.create_task(term.run())

    async def _run_schedules(self, part: SchedulesPart) -> None:
        """Run VgpuSchedules until cancelled, which ends each connection to a hypervisor."""
        dependencies, namespace = self._dependencies, self._options.settings.namespace
        self._schedules = part.Schedules(
            dependencies.client, namespace, dependencies.clock, may_call_until_s=self._may_write_until_s
        )
        if self.term is not None:
            self.term.follow(self._schedules)
        try:
            await self._schedules.run(dependencies.random)
        finally:
            self._schedules = None

    def _may_write_until_s(self) -> float:
        return self._election.may_write_until_s if self._options.elects else math.inf

    def pages(self) -> dict[str, Callable[[], PageAnswer]]:
        """Return the pages that the process serves."""

        def healthz() -> PageAnswer:
            return PageAnswer(200, "ok\n")

        def readyz() -> PageAnswer:
            missing = self._missing()
            return PageAnswer(503, f"{missing}\n") if missing is not None else PageAnswer(200, "ok\n")

        def metrics() -> PageAnswer:
            more = self._schedules.metrics() if self._schedules is not None else ()
            return PageAnswer(200, page(self.term, self.certificate, more), CONTENT_TYPE)

        return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}

    def _missing(self) -> str | None:
        """Return why this process is not ready: it leads and has not decided yet, or knows no leader."""
        if self.term is None:
            return None if self._election.leader is not None else "no controller is known to lead"
        if self.term.decisions is None:
            why = "; ".join(str(error) for error in self.term.problems())
            waiting = "waiting for the API server: not all objects are observed yet"
            return f"{waiting}: {why}" if why else waiting
        return None


async def run_until_stopped(options: ControllerOptions) -> None:
    """Run the controller until SIGTERM or SIGINT; it releases its lease, so that another one leads at once."""
    if options.settings.image is None:
        log.warning(
            "gpuvirt's own image is not known, so this controller deploys nothing to any node; it only labels nodes"
            " and writes GpuNodes; set --image or GPUVIRT_IMAGE"
        )
    await until_stopped(ControllerProcess(options).run())
