"""The admission of pods: the golden files, and laws for pods of any shape."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.plain import Plain
from gpuvirt.webhook.injectionconfig import InjectionConfig, parse
from tests.deploy.chart.helmchart import at, items
from tests.webhook.goldens import CASES, admitted, decided, golden, result
from tests.webhook.pods import MDEV, TYPE, WHOLE, Pod, pods, vgpu_pods

HOT = parse("version: v1\nclasses: {kata: {profile: hot-plug, licenceSecret: s}}", where="c")
IMAGE = "{image: registry.example/driver:1}"
COLD = parse(
    f"version: v1\nclasses: {{kata: {{profile: cold-plug, mdev: warn, nvidia: {IMAGE}, gridd: {IMAGE}}}}}", where="c"
)
CONFIGS = st.sampled_from([HOT, COLD])
OWN = {"nvidia", "gridd"}
EXTENDED = {"PATH", "LD_LIBRARY_PATH"}


def named(content: Plain) -> list[Plain]:
    return [at(item, "name") for item in items(content)]


def without(content: Plain, *fields: str) -> Plain:
    assert isinstance(content, dict)
    return {key: value for key, value in content.items() if key not in fields}


@pytest.mark.parametrize("name", CASES)
def test_a_pod_is_admitted_as_its_golden_file_says(name: str) -> None:
    assert result(name) == golden(name).read_text()


@given(pods(["kata", "runc", None], [MDEV, TYPE, WHOLE]), CONFIGS)
def test_admitting_twice_adds_nothing_more(pod: Pod, config: InjectionConfig) -> None:
    once = admitted(pod, config)
    assert admitted(once, config) == once
    assert not any("none is added" in warning for warning in decided(once, config).warnings)


@given(pods(["kata"], [WHOLE, "example.com/nic"]), CONFIGS)
def test_a_pod_without_a_vgpu_is_unchanged(pod: Pod, config: InjectionConfig) -> None:
    found = decided(pod, config)
    assert (found.refusal, found.operations, found.warnings) == (None, (), ())


@given(pods(["", None], [MDEV, TYPE, "nvidia.com/vgpu"]) | pods(["runc"], [WHOLE, "nvidia.com/vgpu"]), CONFIGS)
def test_a_pod_of_no_class_or_without_a_vgpu_is_unchanged(pod: Pod, config: InjectionConfig) -> None:
    found = decided(pod, config)
    assert (found.refusal, found.operations, found.warnings) == (None, (), ())


@pytest.mark.parametrize(
    ("resources", "scheduler", "code"),
    [
        ({TYPE: 1}, "default-scheduler", ReasonCode.CLASS_NOT_CONFIGURED),
        ({TYPE: 1, "nvidia.com/vgpu": 1}, "another", ReasonCode.CLASS_NOT_CONFIGURED),
        ({TYPE: 1, "nvidia.com/vgpu": 1}, "default-scheduler", None),
        ({"nvidia.com/vgpu": 1}, "default-scheduler", None),
    ],
)
def test_a_pod_of_a_class_that_the_config_lacks_is_refused_unless_it_may_come_for_its_units(
    resources: dict[str, Plain], scheduler: str, code: ReasonCode | None
) -> None:
    container: Plain = {"name": "main", "image": "x", "resources": {"limits": resources}}
    found = decided(
        {"metadata": {}, "spec": {"runtimeClassName": "new", "schedulerName": scheduler, "containers": [container]}},
        HOT,
    )
    assert (found.refusal.code if found.refusal is not None else None) == code
    assert found.refusal is None or "create the pod again in 2 minutes" in found.refusal.text


@given(vgpu_pods(), CONFIGS)
def test_nothing_of_the_user_is_changed_but_what_is_documented(pod: Pod, config: InjectionConfig) -> None:
    before, after = at(pod, "spec"), at(admitted(pod, config), "spec")
    lists = ("containers", "initContainers", "volumes")
    assert without(before, *lists) == without(after, *lists)
    assert items(at(after, "volumes"))[: len(items(at(before, "volumes")))] == items(at(before, "volumes"))
    for group in ("containers", "initContainers"):
        users = [item for item in items(at(after, group)) if at(item, "name") not in OWN]
        for old, new in zip(items(at(before, group)), users, strict=True):
            assert without(old, "env", "volumeMounts") == without(new, "env", "volumeMounts")
            mounts, env = items(at(old, "volumeMounts")), items(at(old, "env"))
            assert items(at(new, "volumeMounts"))[: len(mounts)] == mounts
            for variable, changed in zip(env, items(at(new, "env")), strict=False):
                if variable != changed:
                    assert at(variable, "name") in EXTENDED
                    assert at(variable, "valueFrom") is None
                    assert str(at(changed, "value")).startswith(str(at(variable, "value") or ""))
                assert without(variable, "value") == without(changed, "value")


@given(vgpu_pods(), CONFIGS, st.data())
def test_parts_that_were_removed_are_added_again(pod: Pod, config: InjectionConfig, data: st.DataObject) -> None:
    whole = admitted(pod, config)
    spec = at(whole, "spec")
    assert isinstance(spec, dict)
    removed = data.draw(st.sets(st.sampled_from(["nvidia", "gridd", "dev", "nvidia-driver"])))
    parts = {group: [item for item in items(spec.get(group)) if at(item, "name") not in removed] for group in
             ("initContainers", "volumes")}  # fmt: skip
    partial: Plain = {**pod, "spec": {**spec, **parts}}
    again = at(admitted(partial, config), "spec")
    assert named(at(again, "initContainers")) == named(spec.get("initContainers"))
    assert set(map(str, named(at(again, "volumes")))) == set(map(str, named(spec.get("volumes"))))


def own_part(group: str, name: str, changes: Pod, restart_policy: str = "Always", moved_to: str = "") -> Pod:
    """Return an admitted pod, one of whose added containers is changed, as if the user had written it so."""
    main: Plain = {"name": "main", "image": "x", "resources": {"limits": {TYPE: 1}}}
    spec: Pod = {"runtimeClassName": "kata", "restartPolicy": restart_policy, "containers": [main]}
    whole = json.loads(json.dumps(at(admitted({"metadata": {}, "spec": spec}, HOT), "spec")))
    (part,) = (item for item in items(whole[group]) if at(item, "name") == name)
    assert isinstance(part, dict)
    changed: Plain = {**part, **changes}
    lists: Pod = {group: [changed if item is part else item for item in items(whole[group])]}
    if moved_to:
        changed = without(changed, "restartPolicy")
        lists = {group: [item for item in items(whole[group]) if item is not part]}
        lists[moved_to] = [*items(whole[moved_to]), changed]
    return {"metadata": {}, "spec": {**whole, **lists}}


@pytest.mark.parametrize("name", ["nvidia", "gridd"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "busybox:1"),
        ("command", ["/bin/sh", "-c", "wget example.com"]),
        ("args", ["--help"]),
        ("env", []),
        ("volumeMounts", [{"name": "dev", "mountPath": "/dev"}]),
        ("securityContext", {"runAsUser": 1000, "capabilities": {"add": ["ALL"]}}),
        ("securityContext", {"runAsUser": 0}),
    ],
)
def test_a_container_that_differs_from_the_added_one_is_reported(name: str, field: str, value: Plain) -> None:
    found = decided(own_part("initContainers", name, {field: value}), HOT)
    assert (found.refusal, found.operations) == (None, ())
    index = ["nvidia", "gridd"].index(name)
    used = f"spec.initContainers[{index}]: the pod's own container {name} is used, and none is added"
    assert found.warnings == (f"{used}; it differs from the webhook's in {field}",)


@pytest.mark.parametrize("limits", [{}, {TYPE: 0}, {MDEV: 1}])
def test_a_loader_without_the_pods_vgpus_is_reported(limits: Pod) -> None:
    pod = own_part("initContainers", "nvidia", {"resources": {"limits": limits}})
    assert any(warning.endswith(" in resources") for warning in decided(pod, HOT).warnings)


def test_a_loader_that_runs_as_a_sidecar_is_reported() -> None:
    pod = own_part("initContainers", "nvidia", {"restartPolicy": "Always"})
    assert [warning.rpartition(" in ")[2] for warning in decided(pod, HOT).warnings] == ["restartPolicy"]


def test_what_others_add_to_an_added_container_is_no_difference() -> None:
    pod = own_part("initContainers", "gridd", {})
    part = items(at(pod, "spec", "initContainers"))[1]
    more: Pod = {
        "imagePullPolicy": "IfNotPresent",
        "env": [*items(at(part, "env")), {"name": "PROXY", "value": "p"}],
        "volumeMounts": [*items(at(part, "volumeMounts")), {"name": "token", "mountPath": "/token"}],
        "resources": {"limits": {"cpu": "1"}},
        "securityContext": {"runAsUser": 0, "capabilities": {"add": ["all"]}, "seccompProfile": {"type": "X"}},
    }
    found = decided(own_part("initContainers", "gridd", more), HOT)
    assert (found.refusal, found.operations, found.warnings) == (None, (), ())


@pytest.mark.parametrize(
    ("pod", "seen"),
    [
        (own_part("initContainers", "nvidia", {}, moved_to="containers"), "spec.containers[1]"),
        (own_part("initContainers", "gridd", {"restartPolicy": ""}), "spec.initContainers[1]"),
        (own_part("initContainers", "gridd", {"resources": {"limits": {TYPE: "1"}}}), "spec.initContainers[1]"),
        (own_part("initContainers", "gridd", {}, "OnFailure", moved_to="containers"), "spec.containers[1]"),
        (own_part("initContainers", "gridd", {"image": "own:1"}, "Never", moved_to="containers"), "spec.containers[1]"),
    ],
)
def test_a_container_that_can_not_serve_as_the_added_one_is_refused(pod: Pod, seen: str) -> None:
    refusal = decided(pod, HOT).refusal
    assert refusal is not None
    assert (refusal.code, refusal.seen) == (ReasonCode.INJECTED_NAME_TAKEN, seen)


def test_an_ordinary_gridd_whose_program_is_the_users_may_end() -> None:
    own: Pod = {"command": ["/bin/sh", "-c", "nvidia-gridd; wait-for-main"]}
    found = decided(own_part("initContainers", "gridd", own, "Never", moved_to="containers"), HOT)
    assert found.refusal is None
    (warning,) = found.warnings
    assert warning.endswith("in command, restartPolicy; unless it ends by itself, the pod never ends")


def test_a_container_with_the_name_of_one_that_is_not_added_is_the_users() -> None:
    config = parse("version: v1\nclasses: {kata: {profile: hot-plug, gridd: {image: ''}}}", where="c")
    main: Plain = {"name": "gridd", "image": "x", "resources": {"limits": {TYPE: 1}}}
    spec = at(admitted({"spec": {"runtimeClassName": "kata", "containers": [main]}}, config), "spec")
    (container,) = items(at(spec, "containers"))
    assert named(at(container, "volumeMounts")) == ["dev", "nvidia-driver"]
    (loader,) = items(at(spec, "initContainers"))
    assert at(loader, "resources", "limits", TYPE) == "1"


@given(vgpu_pods(), CONFIGS)
def test_the_added_containers_come_first_and_have_requests_and_limits(pod: Pod, config: InjectionConfig) -> None:
    first, second = items(at(admitted(pod, config), "spec", "initContainers"))[:2]
    assert (at(first, "name"), at(second, "name")) == ("nvidia", "gridd")
    assert at(second, "restartPolicy") == "Always"
    for container in (first, second):
        limits = at(container, "resources", "limits")
        assert isinstance(limits, dict)
        assert {"cpu", "memory"} <= limits.keys()
        assert at(container, "resources", "requests") == limits
    assert any(at(first, "resources", "limits", vgpu) for vgpu in (MDEV, TYPE)) == (config is HOT)
