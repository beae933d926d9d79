"""A node's label and ConfigMap as a request, and the node's state as its label."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.cluster.clusterside import OPERAND_LABELS, observed_of, operand_labels, problem_of
from gpuvirt.agent.cluster.nodelabels import MOST_REASON, request_of_config_map, request_of_node, state_labels
from gpuvirt.kube.failures import ApiRefusedError, ForbiddenError, UnauthorizedError, UnreachableError
from gpuvirt.kube.kinds.core import ConfigMap, Node, Pod
from gpuvirt.kube.labels import (
    CONFIG_LABEL,
    ENFORCEMENT_LABEL,
    PAUSED_FOR_VGPUS,
    REASON_ANNOTATION,
    STATE_LABEL,
    WORKLOAD_LABEL,
    patch_of,
    patched,
)
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, OperandsObserved, Progress, StateName
from gpuvirt.model.reasons import ReasonCode

MAP = ObjectKey("gpuvirt", "configs")
WAITS = Progress(StateName.PENDING, "waits for pod default/vm-a")


@pytest.mark.parametrize(
    ("labels", "desired"),
    [({CONFIG_LABEL: "A10-4Q"}, Observed("A10-4Q")), ({}, Observed(None)), ({CONFIG_LABEL: ""}, Observed(None))],
)
def test_a_config_label_is_a_request_and_an_absent_label_is_observed_as_absent(
    labels: dict[str, str], desired: Observed[str]
) -> None:
    desired_node = request_of_node(Node(Metadata(name="node01", labels=labels)))
    assert desired_node == NodeRequest(config=desired, workload=Observed(None), enforcement=Observed(None))


def test_the_workload_label_is_a_request_of_its_own() -> None:
    desired_node = request_of_node(Node(Metadata(name="node01", labels={WORKLOAD_LABEL: "vm-vgpu"})))
    assert (desired_node.config, desired_node.workload) == (Observed(None), Observed("vm-vgpu"))
    assert desired_node.updated(NodeRequest(config=Observed("A10-4Q"))).workload == Observed("vm-vgpu")


@pytest.mark.parametrize(("text", "found"), [("hami-core", "hami-core"), ("", None), ("nonsense", "nonsense")])
def test_the_label_of_the_enforcement_is_a_request_of_its_own(text: str, found: str | None) -> None:
    request = request_of_node(Node(Metadata(name="node01", labels={ENFORCEMENT_LABEL: text})))
    assert request == NodeRequest(Observed(None), workload=Observed(None), enforcement=Observed(found))
    assert request.updated(NodeRequest(config=Observed("A10-4Q"))).enforcement == Observed(found)


def test_a_deleted_node_keeps_its_desired_state() -> None:
    """Its VMs run while an admin deletes the Node to register it again."""
    before = NodeRequest(Observed("A10-4Q"), Observed(None))
    assert before.updated(request_of_node(None)) == before


def test_a_config_map_is_read_as_text_with_its_origin() -> None:
    where = "ConfigMap gpuvirt/configs, key config.yaml"
    config_map = ConfigMap(Metadata(), {"config.yaml": "version: v1"})
    assert request_of_config_map(MAP, config_map) == NodeRequest(configs=Observed(ConfigText("version: v1", where)))
    assert request_of_config_map(MAP, ConfigMap(Metadata(), {"config.yaml": ""})).configs == Observed(
        ConfigText("", where)
    )


def test_a_missing_config_map_is_absent_and_a_missing_key_is_reported_with_the_existing_keys() -> None:
    where = "ConfigMap gpuvirt/configs, key config.yaml"
    assert request_of_config_map(MAP, None) == NodeRequest(configs=Observed(None))
    for data, keys in (({}, ()), ({"config.yml": "x"}, ("config.yml",))):
        assert request_of_config_map(MAP, ConfigMap(Metadata(), data)).configs == Observed(ConfigText("", where, keys))


def test_an_update_keeps_fields_that_were_not_observed() -> None:
    config = NodeRequest(config=Observed("A10-4Q"))
    both = config.updated(NodeRequest(configs=Observed(None)))
    assert both == NodeRequest(Observed("A10-4Q"), Observed(None))
    assert both.updated(NodeRequest()) == both
    assert both.updated(NodeRequest(config=Observed(None))) == NodeRequest(Observed(None), Observed(None))


def state_metadata(state: str | None, reason: str | None) -> Metadata:
    labels = {STATE_LABEL: state} if state is not None else {}
    annotations = {REASON_ANNOTATION: reason} if reason is not None else {}
    return Metadata(name="node01", labels=labels, annotations=annotations)


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        (None, state_metadata(None, None)),
        (None, state_metadata("failed", "old")),
        (WAITS, state_metadata("pending", WAITS.reason)),
        (Progress(StateName.SUCCESS), state_metadata("success", None)),
        (Progress(StateName.FAILED, "two\n lines"), state_metadata("failed", "two lines")),
    ],
)
def test_an_up_to_date_or_undesired_state_is_not_written(desired: Progress | None, observed: Metadata) -> None:
    assert patch_of([state_labels(desired)], observed) is None


states = st.builds(Progress, st.sampled_from(StateName), st.text(max_size=3000))
texts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@given(states, texts, texts, st.none() | st.sampled_from(["pending", "junk"]))
def test_patching_a_node_sets_the_state_and_keeps_all_other_fields(
    desired: Progress, labels: dict[str, str], annotations: dict[str, str], state: str | None
) -> None:
    before = state_metadata(state, "old")
    observed = Metadata(labels=labels | before.labels, annotations=annotations | before.annotations)
    metadata = {"labels": observed.labels, "annotations": observed.annotations, "uid": "u", "resourceVersion": "7"}
    fields = msgspec.json.decode(
        msgspec.json.encode({"kind": "Node", "spec": {"unknown": [1.5, None]}, "metadata": metadata}),
        type=dict[str, msgspec.Raw],
    )
    patch = patch_of([state_labels(desired)], observed)
    assert patch is not None
    written = msgspec.json.encode(patched(fields, patch))
    node = msgspec.json.decode(written, type=Node)
    assert patch_of([state_labels(desired)], node.metadata) is None, "the written labels show the state"
    assert len(node.metadata.annotations.get(REASON_ANNOTATION, "")) <= MOST_REASON + 3
    others = {name: text for name, text in node.metadata.labels.items() if name != STATE_LABEL}
    assert others == labels
    notes = {name: text for name, text in node.metadata.annotations.items() if name != REASON_ANNOTATION}
    assert notes == annotations
    assert b'"spec":{"unknown":[1.5,null]}' in written
    assert b'"resourceVersion":"7"' in written


def test_a_node_without_labels_can_be_patched() -> None:
    patch = patch_of([state_labels(WAITS)], Metadata())
    assert patch is not None
    node = patched({"metadata": msgspec.Raw(b'{"name":"node01"}')}, patch)
    assert bytes(node["metadata"]) == msgspec.json.encode(
        {"name": "node01", "labels": {STATE_LABEL: "pending"}, "annotations": {REASON_ANNOTATION: WAITS.reason}}
    )


PLUGIN, VALIDATOR = OPERAND_LABELS
label_values = st.sampled_from(["true", "false", "", PAUSED_FOR_VGPUS, "paused-for-driver-upgrade"])
deployed = st.dictionaries(st.sampled_from(OPERAND_LABELS), label_values)


@given(deployed, st.lists(st.booleans(), max_size=4))
def test_running_operands_are_paused_and_resumed_and_others_left_alone(
    labels: dict[str, str], desired: list[bool]
) -> None:
    node = Metadata(labels=labels)
    for away in desired:
        node = Metadata(
            labels={**node.labels, **{k: v or "" for k, v in operand_labels(node, away=away).labels.items()}}
        )
        for label, value in labels.items():
            ours = value in {"true", PAUSED_FOR_VGPUS}
            assert node.labels[label] == ((PAUSED_FOR_VGPUS if away else "true") if ours else value)
    assert node.labels.keys() == labels.keys()
    back = {**node.labels, **operand_labels(node, away=False).labels}
    assert back == {label: "true" if value == PAUSED_FOR_VGPUS else value for label, value in labels.items()}


def test_operands_count_as_running_while_labels_or_pods_show_them() -> None:
    pod = Pod(Metadata(name="nvidia-sandbox-validator-x2vkq", namespace="gpu-operator"))
    running, paused = {PLUGIN: "true", VALIDATOR: "false"}, {PLUGIN: PAUSED_FOR_VGPUS, VALIDATOR: "false"}
    assert observed_of(running, [pod]) == OperandsObserved((PLUGIN,), ("gpu-operator/nvidia-sandbox-validator-x2vkq",))
    assert observed_of(paused, []) == OperandsObserved()
    assert observed_of(None, []) is None, "the node is absent"
    assert observed_of(paused, None) is None, "the pods are unknown"


def test_components_of_the_agent_write_separate_keys() -> None:
    node = Metadata(labels={PLUGIN: "true", STATE_LABEL: "success"})
    patch = patch_of([state_labels(WAITS), operand_labels(node, away=True)], node)
    assert patch is not None
    assert patch.metadata.labels == {STATE_LABEL: "pending", PLUGIN: PAUSED_FOR_VGPUS}
    assert patch.metadata.annotations == {REASON_ANNOTATION: WAITS.reason}
    only_a_label = patch_of([operand_labels(node, away=True)], node)
    assert msgspec.json.encode(only_a_label) == msgspec.json.encode(
        {"metadata": {"labels": {PLUGIN: PAUSED_FOR_VGPUS}}}
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnreachableError("x"), ReasonCode.API_SERVER_AWAY),
        (ApiRefusedError("x"), ReasonCode.API_SERVER_AWAY),
        (ForbiddenError("x"), ReasonCode.API_FORBIDDEN),
        (UnauthorizedError("x"), ReasonCode.API_FORBIDDEN),
    ],
)
def test_an_api_error_becomes_a_reason(error: ApiRefusedError, code: ReasonCode) -> None:
    problem = problem_of(error, "to label its node")
    assert problem is not None
    assert (problem.code, problem.seen) == (code, "x")
    assert problem_of(None, "to label its node") is None
