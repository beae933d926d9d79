"""Every outlet reports each way in which a node's desired state can be invalid; the host stays unchanged."""

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.agent import metrics
from gpuvirt.agent.cluster.gpunode import events_between, request_of_spec, status_of
from gpuvirt.agent.cluster.nodelabels import OF_VGPUS, OF_WORKLOAD, request_of_config_map, state_labels
from gpuvirt.cli.evidence import gather
from gpuvirt.cli.output import diagnosisrender, render
from gpuvirt.controller import clusterstatus
from gpuvirt.controller import process as controllermetrics
from gpuvirt.controller.controller import log_invalid
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.controller.policy.policies import of_node
from gpuvirt.controller.policy.status import INVALID
from gpuvirt.controller.policy.status import status_of as policy_status_of
from gpuvirt.diagnosis.diagnosis import report as diagnose
from gpuvirt.diagnosis.explaining import explain_device
from gpuvirt.facts.ids import PciAddress
from gpuvirt.kube.kinds.core import ConfigMap
from gpuvirt.kube.kinds.gpunode import READY, GpuMode, GpuNode, Origins, Spec, Status
from gpuvirt.kube.labels import DEPLOY, SETS
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.invalid import Origin
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.web.exposition import text_of
from tests.agent.node.simnode import SimNode, running_node
from tests.controller.observedcluster import AT, SETTINGS, ObservedCluster, node
from tests.diagnosis.doctor.sickhost import around
from tests.sim.simulated import Simulated

GPU, NO_GPU = PciAddress("0000:3b:00.0"), "0000:3c:00.0"
MAP = ObjectKey("gpuvirt", "configs")
GOOD = "version: v1\nvgpu-configs: {mine: [{devices: all, vgpu-devices: {T4-8Q: 2}}]}\n"
VGPU = Settings(mode=DesiredMode.VGPU)
FOLLOWS = Settings(workload_label=True)
NO_VGPU_HOST = "4xRTX2060"


def config_map(text: str | None, key: str = "config.yaml") -> NodeRequest:
    found = ConfigMap(Metadata(), {key: text}) if text is not None else None
    return request_of_config_map(MAP, found)


def labels(config: str | None = None, workload: str | None = None) -> NodeRequest:
    return NodeRequest(config=Observed(config), workload=Observed(workload))


def spec(desired: Spec) -> NodeRequest:
    return request_of_spec(desired)


class Case(msgspec.Struct, frozen=True):
    """A desired state that is invalid."""

    bad: NodeRequest
    origin: Origin
    says: tuple[str, ...]
    """The text of every outlet: the place, the found value, and the nearest valid value."""
    settings: Settings = VGPU
    good: NodeRequest = msgspec.field(default_factory=NodeRequest)
    """The desired state before."""
    code: ReasonCode = ReasonCode.CONFIG_INVALID
    host: str = "4xT4"
    state: str = "vgpus"
    """The state label that reports it."""


NOTHING = NodeRequest(Observed(None), Observed(None), Observed(None))
"""An observed desired state without any value."""
CONFIG, WORKLOAD = "label nvidia.com/vgpu.config", "label nvidia.com/gpu.workload.config"
BY_LABEL = Origins(mode=WORKLOAD, vgpu_config=CONFIG)
POLICY_DEFAULT = "ClusterPolicy cluster-policy $.spec.vgpuDeviceManager.config.default"

CASES: Mapping[str, Case] = {
    "label: no such config": Case(
        labels("nonsense2"), Origin.LABEL, (CONFIG, "'nonsense2'", "default, T4-1A"), good=labels("T4-8Q")
    ),
    "label: a slip": Case(labels("T4-8QQ"), Origin.LABEL, (CONFIG, "'T4-8QQ'", "did you mean T4-8Q?")),
    "label: a size that the card lacks": Case(
        labels("T4-5Q"), Origin.LABEL, (CONFIG, "'T4-5Q'", "nearest are: T4-1Q, T4-2Q, T4-4Q, T4-8Q, T4-16Q and")
    ),
    "label: a type of other cards": Case(
        labels("A10-4Q"), Origin.LABEL, (CONFIG, "'A10-4Q'", "T4-4Q"), good=labels("T4-8Q")
    ),
    "label: no such workload": Case(
        labels(workload="vm-vgpus"), Origin.LABEL, (WORKLOAD, "'vm-vgpus'", "did you mean vm-vgpu?"),
        settings=FOLLOWS, good=labels(workload="vm-passthrough"), state="workload",
    ),
    "label: no such enforcement of shares": Case(
        labels().updated(NodeRequest(enforcement=Observed("hami_core"))), Origin.LABEL,
        ("label gpuvirt.io/shares.enforcement", "'hami_core'", "did you mean hami-core?"), settings=FOLLOWS,
        good=labels(workload="vm-passthrough").updated(NodeRequest(enforcement=Observed("none"))), state="workload",
    ),
    "label under a controller: no such config": Case(
        spec(Spec(mode=DesiredMode.VGPU, vgpu_config="nonsense2", origins=BY_LABEL)), Origin.LABEL,
        (CONFIG, "'nonsense2'", "default, T4-1A"),
        good=spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q", origins=BY_LABEL)),
    ),
    "label under a controller: no such workload": Case(
        labels(workload="vm-vgpus"), Origin.LABEL, (WORKLOAD, "'vm-vgpus'", "did you mean vm-vgpu?"),
        good=spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q", origins=BY_LABEL)), state="workload",
    ),
    "label and settings: container beside vgpu": Case(
        labels(workload="container"), Origin.LABEL, (WORKLOAD, "'container'", "settings ($.modes)"),
        settings=Settings(workload_label=True, modes={GPU: DesiredMode.VGPU}), good=labels(workload="vm-vgpu"),
        state="workload",
    ),
    "GpuNode: no such config": Case(
        spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8R")), Origin.GPU_NODE,
        ("GpuNode $.spec.vgpuConfig", "'T4-8R'", "T4-8Q"), good=spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q")),
    ),
    "GpuNode: no such mode": Case(
        NodeRequest(spec=Observed(GpuNodeSpec("vgpus"))), Origin.GPU_NODE,
        ("GpuNode $.spec.mode", "'vgpus'", "did you mean vgpu?"), good=spec(Spec(mode=DesiredMode.VGPU)),
        state="workload",
    ),
    "GpuNode: no such enforcement of shares": Case(
        NodeRequest(spec=Observed(GpuNodeSpec("vgpu", enforcement="hami"))), Origin.GPU_NODE,
        ("GpuNode $.spec.shares.enforcement", "'hami'", "hami-core"), good=spec(Spec(mode=DesiredMode.VGPU)),
        state="workload",
    ),
    "GpuNode: container beside vgpu": Case(
        spec(Spec(mode=DesiredMode.VGPU, gpus=(GpuMode(address=GPU, mode=DesiredMode.CONTAINER),))), Origin.GPU_NODE,
        ("GpuNode $.spec", "container and vgpu"), good=spec(Spec(mode=DesiredMode.VGPU)), state="workload",
    ),
    "GpuNode: the address of no GPU": Case(
        spec(Spec(mode=DesiredMode.VGPU, gpus=(GpuMode(address=NO_GPU, mode=DesiredMode.PASSTHROUGH),))),
        Origin.GPU_NODE, ("GpuNode $.spec.gpus[0].address", NO_GPU, f"did you mean {GPU}?"),
        good=spec(Spec(mode=DesiredMode.VGPU)), state="workload",
    ),
    "GpuNode: vgpu on cards that carry none": Case(
        spec(Spec(mode=DesiredMode.VGPU)), Origin.GPU_NODE, ("GpuNode $.spec.mode", "'default'"),
        good=spec(Spec(mode=DesiredMode.CONTAINER)), settings=Settings(), host=NO_VGPU_HOST,
    ),
    "ClusterPolicy: no such default config": Case(
        spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8X", origins=Origins(vgpu_config=POLICY_DEFAULT))),
        Origin.CLUSTER_POLICY, (POLICY_DEFAULT, "'T4-8X'", "T4-8Q"),
        good=spec(Spec(mode=DesiredMode.VGPU, vgpu_config="T4-8Q", origins=BY_LABEL)),
    ),
    "ConfigMap: not to be parsed": Case(
        config_map(GOOD.replace("v1", "v2")), Origin.CONFIG_MAP,
        ("ConfigMap gpuvirt/configs, key config.yaml", "'v2'", "'v1'"), good=labels("mine").updated(config_map(GOOD)),
    ),
    "ConfigMap: gone": Case(
        config_map(None), Origin.CONFIG_MAP, ("ConfigMap gpuvirt/configs, key config.yaml", "no longer exists"),
        good=labels("mine").updated(config_map(GOOD)),
    ),
    "ConfigMap: under another key": Case(
        config_map(GOOD, "config.yml"), Origin.CONFIG_MAP,
        ("ConfigMap gpuvirt/configs, key config.yaml", "'config.yml'"), good=labels("mine").updated(config_map(GOOD)),
    ),
    "ConfigMap: lacks the named config": Case(
        labels("mina"), Origin.LABEL, (CONFIG, "'mina'", "ConfigMap gpuvirt/configs", "did you mean mine?"),
        good=labels("mine").updated(config_map(GOOD)),
    ),
    "ConfigMap: a type that the GPU lacks": Case(
        config_map(GOOD.replace("all", "[0]").replace("T4-8Q", "A10-8Q")), Origin.LABEL, (GPU, "A10-8Q", "T4-8Q"),
        good=labels("mine").updated(config_map(GOOD)), code=ReasonCode.NO_SUCH_TYPE,
    ),
    "settings: no such config": Case(
        labels(), Origin.SETTINGS, ("settings $.vgpu_config", "'T4-8X'", "T4-8Q"),
        settings=Settings(mode=DesiredMode.VGPU, vgpu_config="T4-8X"),
    ),
    "settings: no such ConfigMap": Case(
        config_map(None), Origin.SETTINGS, ("settings $.vgpu_config_map", "'my-configs'"),
        settings=Settings(mode=DesiredMode.VGPU, vgpu_config_map="my-configs"), good=labels(),
    ),
    "settings: the address of no GPU": Case(
        labels(), Origin.SETTINGS, ("settings $.modes", NO_GPU, f"did you mean {GPU}?"),
        settings=Settings(workload_label=True, mode=DesiredMode.VGPU, modes={NO_GPU: DesiredMode.PASSTHROUGH}),
        state="workload",
    ),
    "settings: vgpu of a card for which the config has none": Case(
        labels("T4-8Q"), Origin.SETTINGS, (f"settings $.modes.{GPU}", "'none-here'", "T4-1A"),
        settings=Settings(modes={GPU: DesiredMode.VGPU}), good=labels(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class NodeReports:
    """The sources of every outlet's report about a node."""

    node: SimNode
    folder: Path
    log: str
    before: Status
    after: Status
    decided: Decisions
    controller_log: str
    case: Case

    def text_of(self, write: Callable[[], object]) -> str:
        """Return the output of a command."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            write()
        return out.getvalue()


INVALID_VALUES = re.compile(r'^gpuvirt_desired_state_invalid\{.*\borigin="(.*?)",reason="(.*?)"\} (\d+)$', re.MULTILINE)
"""The metric has no message; the pages of agent and controller have its origins, reasons and counts."""


def from_file(reports: NodeReports) -> str:
    view = msgspec.json.decode((reports.folder / "node.json").read_bytes(), type=NodeView)
    (found,) = view.invalid
    assert (found.origin, found.reason.code) == (reports.case.origin, reports.case.code)
    return f"{found.where} {found.found!r} {found.expected} {found.reason.text} {' '.join(found.near)}"


def of_doctor(reports: NodeReports) -> str:
    evidence = replace(gather(reports.node.kernel, around()), view=reports.node.view)
    found = diagnose(evidence)
    assert found.level is Level.ERROR
    return reports.text_of(lambda: diagnosisrender.report(found, every=False))


def of_explain(reports: NodeReports, target: str) -> str:
    evidence = replace(gather(reports.node.kernel, around()), view=reports.node.view)
    return reports.text_of(lambda: diagnosisrender.explanation(explain_device(evidence, target)))


def state_label(reports: NodeReports) -> str:
    agent = reports.node.agent
    of_vgpus = reports.case.state == "vgpus"
    states, names = (agent.reports.vgpus, OF_VGPUS) if of_vgpus else (agent.reports.workload, OF_WORKLOAD)
    keys = state_labels(states.get(), names)
    return (keys.annotations.get(names.annotation) or "") if keys.labels == {names.label: "failed"} else str(keys)


def ready(reports: NodeReports) -> str:
    (found,) = (condition for condition in reports.after.conditions if condition.type == READY)
    return found.message if (found.status, found.reason) == ("False", reports.case.code) else str(found)


def of_policy(reports: NodeReports, kind: str) -> str:
    progress = reports.decided.progress
    status = policy_status_of(progress, Metadata(name="cluster-policy"), None, "gpuvirt", AT)
    assert (status.state, status.nodes and status.nodes.invalid, status.nodes and status.nodes.ready) == (
        "notReady", 1, 0,
    )  # fmt: skip
    return next((condition.message for condition in status.conditions if condition.type == kind), "no such condition")


def status_rows(reports: NodeReports) -> str:
    deploy = {f"{DEPLOY}{label}": "true" for label in SETS[Workload.VGPU]}
    labelled = node("vm-vgpu", gpu_present="true")
    found = msgspec.structs.replace(
        labelled, metadata=msgspec.structs.replace(labelled.metadata, labels={**labelled.metadata.labels, **deploy})
    )
    rows = clusterstatus.rows([found], {"node01": GpuNode(metadata=Metadata(name="node01"), status=reports.after)}, ())
    return " ".join(row.detail for row in rows if not row.ready and row.state == reports.case.code)


OUTLETS: Mapping[str, Callable[[NodeReports], str]] = {
    "the agent's log": lambda reports: reports.log,
    "node.json": from_file,
    "gpuvirt devices": lambda reports: reports.text_of(lambda: render.devices(reports.node.view, every=False)),
    "gpuvirt doctor": of_doctor,
    "gpuvirt why ADDRESS": lambda reports: of_explain(reports, reports.node.view.gpus[0].address),
    "gpuvirt why RESOURCE": lambda reports: of_explain(reports, "nvidia.com/GRID_T4-2Q"),
    "the state label": state_label,
    "the GpuNode's Ready": ready,
    "the GpuNode's status.invalid": lambda reports: " ".join(
        f"{value.where} {value.message}" for value in reports.after.invalid if value.origin == reports.case.origin
    ),
    "an event of the GpuNode": lambda reports: " ".join(
        event.note for event in events_between(reports.before, reports.after) if event.reason == reports.case.code
    ),
    "an event of a GpuNode that is new": lambda reports: " ".join(
        event.note for event in events_between(None, reports.after) if event.reason == reports.case.code
    ),
    "an event of the Node": lambda reports: " ".join(
        announcement.event.note for announcement in reports.decided.announcements if announcement.about.kind == "Node"
    ),
    "an event of the ClusterPolicy": lambda reports: " ".join(
        announcement.event.note
        for announcement in reports.decided.announcements
        if announcement.about.kind == "ClusterPolicy"
    ),
    "the ClusterPolicy's Ready": lambda reports: of_policy(reports, "Ready"),
    "the ClusterPolicy's condition": lambda reports: of_policy(reports, INVALID),
    "the controller's log": lambda reports: reports.controller_log,
    "gpuvirt status": status_rows,
    "gpuvirt status, its list": lambda reports: " ".join(
        row.text for row in of_node("node01", None, GpuNode(metadata=Metadata(name="node01"), status=reports.after))
    ),
}

PAGES: Mapping[str, Callable[[NodeReports], str]] = {
    "agent": lambda reports: metrics.page(reports.node.view, reports.node.agent.telemetry),
    "controller": lambda reports: text_of(controllermetrics.of_decisions(reports.decided)),
}


async def observed(agent: SimNode, request: NodeRequest) -> None:
    """Give the agent a desired state, and the time to apply it."""
    agent.agent.observations.take_request(request)
    for _ in range(4):
        await agent.advance(5)
        await agent.report_account()


def policy_of(status: Status) -> Decisions:
    """Return a controller's decisions for a cluster whose only node has this status."""
    owned = OwnedGpuNode(metadata=ManagedMetadata(name="node01"), status=status)
    return ObservedCluster(nodes=[node("vm-vgpu")], gpu_nodes=[owned]).decided(SETTINGS)


def incomplete_outlets(reports: NodeReports, outlets: Iterable[str]) -> dict[str, str]:
    """Return the outlets with an incomplete report, each with its text."""
    texts = {name: " ".join(OUTLETS[name](reports).split()) for name in outlets}
    return {name: text for name, text in texts.items() if not all(phrase in text for phrase in reports.case.says)}


@pytest.mark.parametrize("name", CASES)
async def test_every_outlet_reports_an_invalid_desired_state(
    name: str, simulated: Simulated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, kernel = CASES[name], simulated(CASES[name].host)
    if "'none-here'" in case.says:
        case = none_here(case)
    async with running_node(kernel, tmp_path, case.settings, watches_gpu_node=case.good.has_spec) as agent:
        await observed(agent, NOTHING.updated(case.good))
        before = status_of(agent.view, GpuNode(metadata=Metadata(name="node01")), AT)
        kernel.writes.clear()
        caplog.clear()
        since = agent.view.invalid
        await observed(agent, case.bad)
        assert kernel.writes == [], "an invalid desired state changes nothing"
        log = "" if since else caplog.text
        await agent.advance(30)
        warned = [record for record in caplog.records if record.getMessage().startswith("desired state: ")]
        assert len(warned) == (0 if since else 1), "it is logged once"
        after = status_of(agent.view, GpuNode(metadata=Metadata(name="node01")), AT + timedelta(minutes=1))
        decided = policy_of(after)
        caplog.clear()
        log_invalid((), decided.progress.invalid)
        reports = NodeReports(agent, tmp_path, log, before, after, decided, caplog.text, case)
        as_from_the_start = {"the agent's log", "an event of the GpuNode"} if since else set[str]()
        assert incomplete_outlets(reports, OUTLETS.keys() - as_from_the_start) == {}
        counted = {name: INVALID_VALUES.findall(page(reports)) for name, page in PAGES.items()}
        assert counted == {name: [(case.origin, case.code, "1")] for name in PAGES}


def none_here(case: Case) -> Case:
    """Return the case of a config for other GPUs than the GPU that is named for mode vgpu."""
    text = "version: v1\nvgpu-configs: {none-here: [{devices: [1], vgpu-devices: {T4-8Q: 2}}]}\n"
    return replace(case, bad=labels("none-here").updated(config_map(text)))


async def test_a_corrected_desired_state_is_no_longer_reported(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path, VGPU) as agent:
        await observed(agent, NOTHING.updated(labels("nonsense2")))
        ill = status_of(agent.view, GpuNode(metadata=Metadata(name="node01")), AT)
        await observed(agent, labels("T4-4Q"))
        assert (agent.view.invalid, agent.view.problems) == ((), ())
        well = status_of(agent.view, GpuNode(metadata=Metadata(name="node01")), AT)
        assert [(event.kind, event.reason) for event in events_between(ill, well)] == [("Normal", "Reconciled")]
        decided = policy_of(well)
        assert decided.progress.invalid == ()
        assert INVALID not in {
            condition.type
            for condition in policy_status_of(decided.progress, Metadata(name="p"), None, "gpuvirt", AT).conditions
        }


async def test_the_last_good_state_is_kept_and_drift_is_corrected_while_a_label_is_invalid(
    simulated: Simulated, tmp_path: Path
) -> None:
    """After a restart, too: the last good state is on disk, and the agent observes the label again."""
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, VGPU) as agent:
        await observed(agent, NOTHING.updated(labels("T4-8Q")))
        offered = agent.offered
        await observed(agent, labels("nonsense2"))
        assert agent.offered == offered
    offered = {name: devices for name, devices in offered.items() if devices}
    kernel.writes.clear()
    async with running_node(kernel, tmp_path, VGPU) as agent:
        await observed(agent, labels("nonsense2"))
        assert (agent.offered, kernel.writes) == (offered, [])
        assert [value.found for value in agent.view.invalid] == ["nonsense2"]
