"""The admission of pods: the golden files, and laws for pods of any shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cluster.admission.injectionconfig import InjectionConfig, parse
from gpuvirt.plain import Plain
from tests.admission.goldens import CASES, admitted, decided, golden, result
from tests.admission.pods import MDEV, TYPE, WHOLE, Pod, pods, vgpu_pods
from tests.chart.helmchart import at, items

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


@given(pods(["kata"], [WHOLE, "example.com/nic"]), CONFIGS)
def test_a_pod_without_a_vgpu_is_unchanged(pod: Pod, config: InjectionConfig) -> None:
    found = decided(pod, config)
    assert (found.refusal, found.operations, found.warnings) == (None, (), ())


@given(pods(["runc", "", None], [MDEV, TYPE, "nvidia.com/vgpu"]), CONFIGS)
def test_a_pod_of_another_class_is_unchanged(pod: Pod, config: InjectionConfig) -> None:
    found = decided(pod, config)
    assert (found.refusal, found.operations, found.warnings) == (None, (), ())


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
