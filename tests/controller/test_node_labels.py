"""The labels that nodes get: the exact sets, labels that are kept, restored, or wait for VMs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.controller.install.uninstall import left_of
from gpuvirt.controller.nodes.labels import LabelInputs, desired_labels, desired_labels_beside, removed_labels
from gpuvirt.controller.nodes.placement import Defaults, leaving, placement_of
from gpuvirt.kube.kinds.gpunode import Gpu, GpuNode, Status, Vgpu
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.labels import (
    ALL,
    DEPLOY,
    NODE_LABEL,
    OPERANDS_LABEL,
    OPERANDS_OFF_ANNOTATION,
    SETS,
    VGPU_DRIVER_LABEL,
    DesiredLabels,
    patch_of,
)
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import LABEL, Workload
from gpuvirt.model.inventory.inventory import Mode

NFD = {"feature.node.kubernetes.io/pci-10de.present": "true"}
ON = Defaults(sandboxed=True)
NOTHING_AROUND = LabelInputs()
GPU = "0000:65:00.0"


def labelled(
    labels: dict[str, str],
    *,
    defaults: Defaults = ON,
    gpu_node: GpuNode | None = None,
    around: LabelInputs = NOTHING_AROUND,
) -> dict[str, str]:
    """Return a node's labels after one pass, with an agent that has observed the desired state."""
    placement = leaving(placement_of(labels, gpu_node, defaults), labels, gpu_node, spec_is_due=False)
    return patched(labels, desired_labels(Metadata(labels=labels), placement, around))


def patched(labels: dict[str, str], keys: DesiredLabels) -> dict[str, str]:
    changed: dict[str, str | None] = {**labels, **keys.labels}
    return {key: value for key, value in changed.items() if value is not None}


def deployed(labels: dict[str, str]) -> set[str]:
    return {label.removeprefix(DEPLOY) for label, value in labels.items() if label in ALL and value == "true"}


def reporting(*gpus: Gpu) -> GpuNode:
    return GpuNode(metadata=Metadata(name="n"), status=Status(gpus=gpus))


def gpu(mode: Mode, *users: str, vgpu_users: tuple[str, ...] = (), vfs: int | None = 0) -> Gpu:
    vgpus = (Vgpu(id="a97c1d93-75b0-5502-bafc-fef8d1839ded", type="nvidia-592", users=vgpu_users),)
    return Gpu(address=GPU, mode=str(mode), users=users, vgpus=vgpus if mode is Mode.VGPU else (), vfs=vfs)


@pytest.mark.parametrize("workload", list(Workload))
def test_each_workload_has_its_exact_set_of_labels(workload: Workload) -> None:
    labels = labelled(NFD | {LABEL: str(workload)})
    assert deployed(labels) == set(SETS[workload])
    assert labels["nvidia.com/gpu.present"] == "true"
    assert (labels.get(NODE_LABEL) == "true") == (workload is not Workload.CONTAINER)


def test_the_default_workload_applies_without_a_label_and_labels_need_enabled_vms() -> None:
    passthrough = Defaults(sandboxed=True, workload=Workload.PASSTHROUGH)
    assert deployed(labelled(NFD, defaults=passthrough)) == set(SETS[Workload.PASSTHROUGH])
    off = labelled(NFD | {LABEL: "vm-vgpu"}, defaults=Defaults(sandboxed=False))
    assert deployed(off) == set(SETS[Workload.CONTAINER])


def test_a_policy_can_share_gpus_by_default() -> None:
    shared = Defaults(sandboxed=True, workload=Workload.SHARED)
    labels = labelled(NFD, defaults=shared)
    assert labels[NODE_LABEL] == "true"
    assert deployed(labels) == set(SETS[Workload.SHARED])
    assert not deployed(labels) & {"driver", "device-plugin"}


def test_beside_nvidias_operator_a_shared_node_has_the_agent_and_keeps_nvidias_operands() -> None:
    labels = NFD | {LABEL: "shared"}
    placement = leaving(placement_of(labels, None, ON), labels, None, spec_is_due=False)
    beside = patched(labels, desired_labels_beside(Metadata(labels=labels), placement, NOTHING_AROUND))
    assert beside == labels | {NODE_LABEL: "true"}
    was = labels | {OPERANDS_LABEL: "false", NODE_LABEL: "true"}
    ours = Metadata(labels=was, annotations={OPERANDS_OFF_ANNOTATION: "true"})
    assert patched(was, desired_labels_beside(ours, placement, NOTHING_AROUND)) == beside


def test_an_unknown_workload_value_leaves_the_node_as_it_is_and_is_reported() -> None:
    before = labelled(NFD | {LABEL: "vm-vgpu"})
    odd = before | {LABEL: "kata"}
    assert labelled(odd) == odd
    problem = placement_of(odd, None, ON).problem
    assert problem is not None
    assert "'kata'" in problem.text
    assert "vm-passthrough" in problem.text


def test_a_workload_change_removes_the_labels_of_the_previous_workload() -> None:
    before = labelled(NFD | {LABEL: "vm-passthrough"})
    assert deployed(labelled(before | {LABEL: "container"})) == set(SETS[Workload.CONTAINER])


@pytest.mark.parametrize("to", ["container", "shared", "vm-passthrough"])
def test_a_node_on_demand_waits_for_the_vgpus_of_its_pods_as_one_for_vgpus(to: str) -> None:
    before = labelled(NFD | {LABEL: "on-demand"})
    of_pod = reporting(gpu(Mode.VGPU, vgpu_users=("pod default/a",)))
    assert deployed(labelled(before | {LABEL: to}, gpu_node=of_pod)) == deployed(before)
    assert deployed(labelled(before | {LABEL: "vm-vgpu"}, gpu_node=of_pod)) == set(SETS[Workload.VGPU])
    gone = reporting(gpu(Mode.CONTAINER))
    assert deployed(labelled(before | {LABEL: to}, gpu_node=gone)) == set(SETS[Workload(to)])


def test_beside_nvidias_operator_a_node_on_demand_has_the_vgpu_driver() -> None:
    labels = NFD | {LABEL: "on-demand"}
    placement = leaving(placement_of(labels, None, ON), labels, None, spec_is_due=False)
    beside = patched(labels, desired_labels_beside(Metadata(labels=labels), placement, NOTHING_AROUND))
    assert beside == labels | {NODE_LABEL: "true", VGPU_DRIVER_LABEL: "true", OPERANDS_LABEL: "false"}


@pytest.mark.parametrize(
    ("to", "mode", "waits"),
    [
        ("container", Mode.PASSTHROUGH, True),
        ("container", Mode.VGPU, True),
        ("container", Mode.UNKNOWN, True),
        ("container", Mode.CONTAINER, False),
        ("container", Mode.UNBOUND, False),
        ("container", Mode.SHARED, True),
        ("shared", Mode.PASSTHROUGH, True),
        ("shared", Mode.VGPU, True),
        ("shared", Mode.CONTAINER, False),
        ("vm-passthrough", Mode.VGPU, True),
        ("vm-passthrough", Mode.PASSTHROUGH, False),
        ("vm-vgpu", Mode.PASSTHROUGH, False),
        ("on-demand", Mode.PASSTHROUGH, False),
        ("on-demand", Mode.VGPU, False),
        ("on-demand", Mode.UNKNOWN, False),
    ],
)
def test_operands_stay_until_gpus_have_left_their_previous_mode(to: str, mode: Mode, waits: bool) -> None:
    origin = "vm-passthrough" if to in {"vm-vgpu", "on-demand"} else "vm-vgpu"
    before = labelled(NFD | {LABEL: origin})
    after = labelled(before | {LABEL: to}, gpu_node=reporting(gpu(mode, "pod default/vm-a")))
    assert deployed(after) == (deployed(before) if waits else set(SETS[Workload(to)]))
    assert after.get(NODE_LABEL) == ("true" if waits or to != "container" else None)


def test_pods_that_a_node_waits_for_are_named() -> None:
    node = reporting(gpu(Mode.VGPU, vgpu_users=("pod default/vm-a",)))
    placement = placement_of(NFD | {LABEL: "container"}, node, ON)
    named = (f"{GPU} (vgpu, used by pod default/vm-a)",)
    assert leaving(placement, NFD, node, spec_is_due=False).leaving == named


def test_a_gpu_without_vgpus_has_left_after_its_agent_observed_the_new_spec() -> None:
    empty = GpuNode(metadata=Metadata(name="n"), status=Status(gpus=(Gpu(address=GPU, mode="vgpu", vfs=0),)))
    placement = placement_of(NFD | {LABEL: "container"}, empty, ON)
    assert leaving(placement, NFD, empty, spec_is_due=True).leaving == (f"{GPU} (vgpu)",)
    assert leaving(placement, NFD, empty, spec_is_due=False).leaving == ()
    behind = GpuNode(metadata=Metadata(name="n", generation=2), status=empty.status)
    assert leaving(placement, NFD, behind, spec_is_due=False).leaving == (f"{GPU} (vgpu)",)


@pytest.mark.parametrize("to", ["vm-passthrough", "container"])
def test_the_vgpu_driver_stays_until_vfs_are_disabled(to: str) -> None:
    before = labelled(NFD | {LABEL: "vm-vgpu"})
    desired = before | {LABEL: to}
    for mode, vfs in ((Mode.VGPU, 16), (Mode.VGPU, None), (Mode.CONTAINER, 16)):
        bare = replace(gpu(mode, vfs=vfs), vgpus=())
        assert deployed(labelled(desired, gpu_node=reporting(bare))) == set(SETS[Workload.VGPU]), (mode, vfs)
    left = replace(gpu(Mode.VGPU, vfs=0), vgpus=())
    assert deployed(labelled(desired, gpu_node=reporting(left))) == set(SETS[Workload(to)])


def test_the_wait_reason_names_enabled_vfs() -> None:
    node = reporting(replace(gpu(Mode.VGPU, vfs=16), vgpus=()))
    placement = placement_of(NFD | {LABEL: "vm-passthrough"}, node, ON)
    assert leaving(placement, NFD, node, spec_is_due=False).leaving == (f"{GPU} (vgpu, 16 VFs on)",)


@pytest.mark.parametrize("vgpus", [True, False], ids=["vgpus", "vfs"])
def test_the_vgpu_driver_comes_back_with_rolled_back_vgpus(vgpus: bool) -> None:
    switched = labelled(labelled(NFD | {LABEL: "vm-vgpu"}) | {LABEL: "vm-passthrough"}, gpu_node=reporting())
    assert deployed(switched) == set(SETS[Workload.PASSTHROUGH])
    again = gpu(Mode.VGPU, vfs=0) if vgpus else replace(gpu(Mode.CONTAINER), vfs=16)
    back = labelled(switched, gpu_node=reporting(again))
    assert deployed(back) == set(SETS[Workload.PASSTHROUGH]) | {"vgpu-manager"}
    by_admin = labelled(switched | {f"{DEPLOY}vgpu-manager": "false"}, gpu_node=reporting(again))
    assert by_admin[f"{DEPLOY}vgpu-manager"] == "false", "an admin set this label"
    assert deployed(labelled(back, gpu_node=reporting())) == set(SETS[Workload.PASSTHROUGH])


def test_a_vgpu_driver_of_the_host_is_not_replaced() -> None:
    found = labelled(NFD | {LABEL: "vm-passthrough"}, gpu_node=reporting(gpu(Mode.VGPU, vfs=16)))
    assert deployed(found) == set(), "another program installed the host's driver"


def test_the_vgpu_driver_stays_while_the_agent_has_not_reported() -> None:
    before = labelled(NFD | {LABEL: "vm-vgpu"})
    unknown = GpuNode(metadata=Metadata(name="n"))
    at = "2026-01-01T00:00:00Z"
    unobserved = Condition(type="Ready", status="Unknown", reason="NotObserved", last_transition_time=at)
    for gpu_node in (None, unknown, replace(unknown, status=Status(conditions=(unobserved,)))):
        assert deployed(labelled(before | {LABEL: "container"}, gpu_node=gpu_node)) == set(SETS[Workload.VGPU])
    alone = {key: value for key, value in before.items() if key != NODE_LABEL} | {LABEL: "container"}
    off = LabelInputs(runs_agent=False)
    assert deployed(labelled(alone, around=off)) == set(SETS[Workload.CONTAINER]), "no agent will ever report"


def test_beside_nvidias_operator_the_vgpu_driver_stays_and_comes_back() -> None:
    def beside(labels: dict[str, str], *gpus: Gpu) -> dict[str, str]:
        node = reporting(*gpus)
        placement = leaving(placement_of(labels, node, ON), labels, node, spec_is_due=False)
        return patched(labels, desired_labels_beside(Metadata(labels=labels), placement, LabelInputs()))

    bare = replace(gpu(Mode.VGPU, vfs=16), vgpus=())
    before = beside(NFD | {LABEL: "vm-vgpu"}, bare)
    assert before[VGPU_DRIVER_LABEL] == "true"
    for workload in ("vm-passthrough", "container"):
        assert beside(before | {LABEL: workload}, bare)[VGPU_DRIVER_LABEL] == "true"
    switched = beside(before | {LABEL: "vm-passthrough"}, gpu(Mode.PASSTHROUGH))
    assert VGPU_DRIVER_LABEL not in switched
    assert beside(switched, gpu(Mode.VGPU))[VGPU_DRIVER_LABEL] == "true"
    assert beside(switched | {LABEL: "container"}, gpu(Mode.VGPU))[VGPU_DRIVER_LABEL] == "true"


def test_gpus_missing_only_from_labels_still_count() -> None:
    before = labelled(NFD | {LABEL: "vm-passthrough"})
    without = {key: value for key, value in before.items() if key not in NFD}
    assert labelled(without, gpu_node=reporting(gpu(Mode.PASSTHROUGH))) == without
    container = labelled(NFD, gpu_node=reporting(gpu(Mode.CONTAINER)))
    bare = {key: value for key, value in container.items() if key not in NFD}
    assert labelled(bare, gpu_node=reporting(gpu(Mode.CONTAINER)))["nvidia.com/gpu.present"] == "false"
    gone = labelled(without)
    assert gone["nvidia.com/gpu.present"] == "false"
    assert not deployed(gone)
    assert NODE_LABEL not in gone
    assert labelled(gone) == gone


def test_disabling_operands_removes_all_labels_except_the_driver_of_running_vms() -> None:
    before = labelled(NFD | {LABEL: "vm-vgpu"}) | {"nvidia.com/gpu.deploy.operands": "false"}
    assert not deployed(labelled(before))
    used = reporting(gpu(Mode.VGPU, vgpu_users=("pod default/vm-a",)))
    assert deployed(labelled(before, gpu_node=used)) == {"vgpu-manager"}


def test_deploy_labels_that_an_admin_set_are_left_alone() -> None:
    before = NFD | {LABEL: "vm-vgpu", f"{DEPLOY}vgpu-manager": "false", f"{DEPLOY}nsvm": "x"}
    after = labelled(before)
    assert after[f"{DEPLOY}vgpu-manager"] == "false"
    assert after[f"{DEPLOY}nsvm"] == "x"
    off = labelled(NFD | {LABEL: "vm-vgpu", f"{DEPLOY}sandbox-device-plugin": "false"})
    assert NODE_LABEL not in off


def test_a_stale_pause_is_removed() -> None:
    paused = NFD | {
        LABEL: "vm-vgpu",
        f"{DEPLOY}sandbox-validator": "paused-for-vgpu-change",
        f"{DEPLOY}client": "mine_paused-for-driver-upgrade",
        f"{DEPLOY}cc-manager": "paused-for-driver-upgrade",
    }
    at_work = labelled(paused, around=LabelInputs(vgpus_change=True, driver_changes=True))
    assert {key: at_work[key] for key in paused} == paused
    healed = labelled(paused)
    assert healed[f"{DEPLOY}sandbox-validator"] == "true"
    assert healed[f"{DEPLOY}client"] == "mine"
    assert healed[f"{DEPLOY}cc-manager"] == "true"


def test_mig_labels_are_for_container_nodes_only() -> None:
    capable = NFD | {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"}
    around = LabelInputs(mig_default="all-disabled")
    container = labelled(capable, around=around)
    assert container["nvidia.com/mig.config"] == "all-disabled"
    assert "mig-manager" in deployed(container)
    assert "nvidia.com/mig.config" not in labelled(capable | {LABEL: "vm-vgpu"}, around=around)
    assert labelled(container | {"nvidia.com/mig.config": "all-1g.5gb"}, around=around)["nvidia.com/mig.config"] != (
        "all-disabled"
    )


def test_beside_nvidias_operator_vm_nodes_are_taken_over_and_given_back() -> None:
    def beside(labels: dict[str, str], annotations: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        metadata = Metadata(labels=labels, annotations=annotations)
        keys = desired_labels_beside(metadata, placement_of(labels, None, ON), LabelInputs())
        changed: dict[str, str | None] = {**annotations, **keys.annotations}
        return patched(labels, keys), {key: value for key, value in changed.items() if value is not None}

    container = NFD | {f"{DEPLOY}driver": "true"}
    assert beside(container, {}) == (container, {})
    ours, marks = beside(container | {LABEL: "vm-passthrough"}, {})
    assert ours["nvidia.com/gpu.deploy.operands"] == "false"
    assert ours[NODE_LABEL] == "true"
    back, unmarked = beside(ours | {LABEL: "container"}, marks)
    assert "nvidia.com/gpu.deploy.operands" not in back
    assert NODE_LABEL not in back
    assert unmarked == {}
    by_admin, _ = beside(NFD | {LABEL: "container", "nvidia.com/gpu.deploy.operands": "false"}, {})
    assert by_admin["nvidia.com/gpu.deploy.operands"] == "false"


VALUES = st.sampled_from(["true", "false", "", "paused-for-vgpu-change", "paused-for-driver-upgrade", "pre-installed"])
LABELS = st.dictionaries(
    st.sampled_from(sorted(ALL | {NODE_LABEL, "nvidia.com/gpu.present", "nvidia.com/gpu.deploy.operands", "other"})),
    VALUES,
)
NODES = st.builds(
    lambda labels, nfd, workload: labels | (NFD if nfd else {}) | ({LABEL: workload} if workload else {}),
    LABELS,
    st.booleans(),
    st.sampled_from(["", "container", "vm-passthrough", "vm-vgpu", "on-demand", "kata"]),
)
GPU_NODES = st.one_of(st.none(), st.builds(lambda mode: reporting(gpu(mode)), st.sampled_from(list(Mode))))
AROUNDS = st.builds(LabelInputs, vgpus_change=st.booleans(), driver_changes=st.booleans(), runs_agent=st.booleans())


REPORTED_ALONE = {NODE_LABEL: "true", "nvidia.com/gpu.present": "true", f"{DEPLOY}vfio-manager": "true"}


@given(NODES, GPU_NODES, AROUNDS)
@example(
    {f"{DEPLOY}vgpu-manager": "true", NODE_LABEL: "true", LABEL: "vm-passthrough"}, None, LabelInputs(runs_agent=False)
)
@example(REPORTED_ALONE, reporting(gpu(Mode.PASSTHROUGH)), LabelInputs(runs_agent=False))
def test_labels_converge_in_a_single_pass_and_other_labels_stay(
    labels: dict[str, str], gpu_node: GpuNode | None, around: LabelInputs
) -> None:
    after = labelled(labels, gpu_node=gpu_node, around=around)
    if NODE_LABEL in labels and NODE_LABEL not in after and not NFD.keys() & labels.keys():
        # Only its agent's report has shown that the node has GPUs, and no agent runs there from now on.
        after = labelled(after, gpu_node=gpu_node, around=around)
    assert labelled(after, gpu_node=gpu_node, around=around) == after
    assert {key: value for key, value in after.items() if key in {"other", LABEL, *NFD}} == {
        key: value for key, value in labels.items() if key in {"other", LABEL, *NFD}
    }


def test_uninstalling_beside_nvidias_operator_keeps_its_labels() -> None:
    labels = {f"{DEPLOY}driver": "true", "nvidia.com/gpu.present": "true", NODE_LABEL: "true"}
    left = patched(labels, removed_labels(Metadata(labels=labels), beside=True))
    assert left == {f"{DEPLOY}driver": "true", "nvidia.com/gpu.present": "true"}


UNREPORTED = {f"{DEPLOY}vgpu-manager": "true", NODE_LABEL: "true", LABEL: "vm-passthrough", next(iter(NFD)): "true"}
"""The driver of vGPUs runs there, and the agent has not reported."""


@given(NODES, GPU_NODES, AROUNDS, st.booleans())
@example(UNREPORTED, None, LabelInputs(runs_agent=False), False)
@example({**UNREPORTED, LABEL: "container"}, None, LabelInputs(runs_agent=False), False)
@example({**UNREPORTED, NODE_LABEL: "false"}, None, LabelInputs(), False)
@example({key: value for key, value in UNREPORTED.items() if key != NODE_LABEL}, None, LabelInputs(), False)
def test_beside_nvidias_operator_labels_converge_in_a_single_pass(
    labels: dict[str, str],
    gpu_node: GpuNode | None,
    around: LabelInputs,
    marked: bool,
) -> None:
    def once(metadata: Metadata) -> Metadata:
        found = placement_of(metadata.labels, gpu_node, ON)
        placement = leaving(found, metadata.labels, gpu_node, spec_is_due=False)
        keys = desired_labels_beside(metadata, placement, around)
        annotations: dict[str, str | None] = {**metadata.annotations, **keys.annotations}
        kept = {key: value for key, value in annotations.items() if value is not None}
        return Metadata(labels=patched(metadata.labels, keys), annotations=kept)

    first = once(Metadata(labels=labels, annotations={"gpuvirt.io/operands-off": "true"} if marked else {}))
    assert once(first) == first
    assert {key: first.labels.get(key) for key in ALL} == {key: labels.get(key) for key in ALL}


@given(NODES, AROUNDS)
def test_uninstalling_removes_all_labels_of_gpuvirt(labels: dict[str, str], around: LabelInputs) -> None:
    metadata = Metadata(labels=labelled(labels, around=around))
    left = patched(metadata.labels, removed_labels(metadata))
    assert not set(left) & (ALL | {NODE_LABEL, "nvidia.com/gpu.present"})
    assert patch_of([removed_labels(Metadata(labels=left))], Metadata(labels=left)) is None


def test_uninstalling_removes_the_state_labels_after_the_agent_is_gone() -> None:
    labels = {
        "nvidia.com/vgpu.config.state": "success",
        f"{DEPLOY}vgpu-manager": "true",
        "gpuvirt.io/os": "ubuntu22.04",
        NODE_LABEL: "true",
        "mine": "x",
    }
    metadata = Metadata(labels=labels, annotations={"gpuvirt.io/vgpu.config.reason": "y"})
    first = patched(labels, left_of(metadata, used=True, agents_gone=False))
    selected = {f"{DEPLOY}vgpu-manager", "gpuvirt.io/os"}
    assert set(first) == {"nvidia.com/vgpu.config.state", *selected, "mine"}, "the driver stays while VMs run"
    discovered = dict.fromkeys(("gpuvirt.io/pci-10de.present", "gpuvirt.io/os-release.id"), "x")
    metadata = replace(metadata, labels=metadata.labels | discovered)
    assert discovered.items() <= patched(metadata.labels, left_of(metadata, used=False, agents_gone=False)).items()
    last = left_of(metadata, used=False, agents_gone=True)
    assert patched(metadata.labels, last) == {"mine": "x"}
    assert last.annotations["gpuvirt.io/vgpu.config.reason"] is None


GPUS = frozenset({"nvidia.com/gpu"})


def served(labels: dict[str, str], resources: frozenset[str] = GPUS) -> dict[str, str]:
    """Return the labels after one pass of a node that offers resources to containers."""
    placement = placement_of(labels, None, ON, resources)
    return patched(labels, desired_labels(Metadata(labels=labels), placement, LabelInputs(mig_default="all-disabled")))


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"])
@pytest.mark.parametrize("chosen", [{}, {LABEL: "container"}])
def test_a_node_that_another_device_plugin_serves_is_left_alone(resource: str, chosen: dict[str, str]) -> None:
    labels = {**NFD, **chosen, "nvidia.com/gpu.product": "NVIDIA-A100"}
    left = served(labels, frozenset({resource}))
    assert left == {**labels, "nvidia.com/gpu.present": "true"}
    assert served(left, frozenset({resource})) == left
    assert placement_of(labels, None, ON, {resource}).left_alone is not None
    assert deployed(served(left, frozenset())) >= set(SETS[Workload.CONTAINER]), "once that plugin is gone"


@pytest.mark.parametrize("label", ["nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.sandbox-validator"])
def test_an_operator_deployed_the_plugin_of_a_node_with_a_label_of_an_operand(label: str) -> None:
    labels = {**NFD, label: "false"}
    assert deployed(served(labels)) >= set(SETS[Workload.CONTAINER]) - {label.removeprefix(DEPLOY)}
    assert placement_of(labels, None, ON, GPUS).left_alone is None


@pytest.mark.parametrize("workload", [workload for workload in Workload if workload is not Workload.CONTAINER])
def test_a_node_for_vms_or_shares_gets_its_operands_beside_another_plugin(workload: Workload) -> None:
    labels = {**NFD, LABEL: workload.value}
    assert deployed(served(labels)) == set(SETS[workload])
