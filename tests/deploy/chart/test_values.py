"""The chart's values, their schema, and the policy's kind; these tests need no helm."""

import json
from collections.abc import Iterator

import pytest
import yaml

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import CHART, ROOT, at

VALUES: Plain = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Plain = json.loads((CHART / "values.schema.json").read_text())
CRD: Plain = yaml.load((ROOT / "deploy/clusterpolicies.yaml").read_text(), yaml.CSafeLoader)
SPEC = at(CRD, "spec", "versions", 0, "schema", "openAPIV3Schema", "properties", "spec")

ELSEWHERE = {
    *(
        "commonLabels",
        "fullnameOverride",
        "global",
        "jobs",
        "nameOverride",
        "image",
        "kata",
        "nvidiaRegistry",
        "nfd",
        "discover",
        "kubevirt",
        "clusterPolicy",
        "gpuCluster",
        "dra",
        "extender",
        "networkPolicy",
        "operator",
        "schedule",
        "scheduler",
        "webhook",
    ),
    "driver.nvidiaDriverCRD",
}
"""The values that do not go into the ClusterPolicy as they are."""


def resolved(schema: Plain) -> Plain:
    """Return a schema, or the schema that it refers to."""
    reference = at(schema, "$ref")
    return at(SCHEMA, *reference.removeprefix("#/").split("/")) if isinstance(reference, str) else schema


def keys(schema: Plain, before: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield all paths that a schema names."""
    properties = at(schema, "properties")
    for name, value in properties.items() if isinstance(properties, dict) else ():
        inner = resolved(value)
        yield f"{before}{name}", inner
        yield from keys(inner, f"{before}{name}.")


def paths(values: Plain, before: str = "") -> Iterator[str]:
    for name, value in values.items() if isinstance(values, dict) else ():
        yield f"{before}{name}"
        yield from paths(value, f"{before}{name}.")


KEYS = dict(keys(SCHEMA))
OF_THE_POLICY = sorted(
    key for key in KEYS if not any(key == parent or key.startswith(f"{parent}.") for parent in ELSEWHERE) and "." in key
)


def test_the_schema_covers_all_values() -> None:
    free = [key for key, schema in KEYS.items() if at(schema, "properties") is None and at(schema, "type") == "object"]
    unknown = [
        path for path in paths(VALUES) if path not in KEYS and not any(path.startswith(parent) for parent in free)
    ]
    assert unknown == []


def test_values_have_a_default_for_each_top_level_key_except_unsupported_keys() -> None:
    theirs = {"global", "gpuCluster", "kataSandboxDevicePlugin", "ccManager", "kataManager", "gds", "gdrcopy"}
    assert isinstance(VALUES, dict)
    assert {key for key in KEYS if "." not in key} == set(VALUES) | theirs


@pytest.mark.parametrize("key", OF_THE_POLICY)
def test_the_schemas_types_equal_those_of_the_policy_crd(key: str) -> None:
    found = SPEC
    for step in key.split("."):
        found = at(found, "properties", step)
    assert isinstance(found, dict), "the API server would refuse or drop the value"
    schema = KEYS[key]
    types = at(schema, "type")
    if types is not None:
        assert at(found, "type") in (types if isinstance(types, list) else [types])
    enum = at(schema, "enum")
    if isinstance(enum, list) and at(found, "enum") is not None:
        assert at(found, "enum") == enum


def test_no_default_image_but_kubernetes_own_has_a_registry() -> None:
    assert isinstance(VALUES, dict)
    repositories = {path: at(VALUES, *path.split(".")) for path in paths(VALUES) if path.endswith("repository")}
    assert len(repositories) > 8
    assert {path: value for path, value in repositories.items() if value} == {
        "image.repository": "gpuvirt",
        "scheduler.image.repository": "registry.k8s.io/kube-scheduler",
    }


def test_chart_version_and_app_version_are_equal() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"]
