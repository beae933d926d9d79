"""Unsupported fields are reported and supported fields change the rendering: table and renderers agree."""

import json
from collections.abc import Iterator

import pytest
import typer
from hypothesis import given, settings
from typer.core import TyperGroup

from gpuvirt.cli.main import program_for
from gpuvirt.controller.operands.rendering import render
from gpuvirt.controller.policy.policies import AGENT_READS, VALIDATOR_READS, unsupported
from gpuvirt.kube.kinds.workloads import encoded
from gpuvirt.plain import Plain
from tests.controller.operands.policies import ALL_KINDS, Schema, policy_of, spec_schema, specs
from tests.controller.operands.policies import given as given_policy


def image(name: str) -> dict[str, Plain]:
    return {"enabled": True, "repository": "r", "image": name, "version": "1"}


BASE: dict[str, Plain] = {
    "sandboxWorkloads": {"enabled": True},
    "vgpuManager": image("vgpu-manager"),
    "driver": {**image("driver"), "manager": {"repository": "r", "image": "manager", "version": "1"}},
    "toolkit": image("toolkit"),
    "devicePlugin": image("plugin"),
    "dcgm": image("dcgm"),
    "dcgmExporter": image("exporter"),
    "gfd": image("gfd"),
}
"""Fields that are rendered, and of which nothing is reported."""
BY_THE_CONTROLLER = {
    "sandboxWorkloads.defaultWorkload",
    "vfioManager.enabled",
    "vgpuDeviceManager.enabled",
}
"""Fields that are not rendered: workloads of nodes, the software that runs VMs, and switches that are on anyway."""
NEVER = {"ccManager", "kataManager"}
"""Operands that are never deployed: `enabled: true` is reported, and none of their other fields."""
ON_BY_DEFAULT = {"sandboxDevicePlugin.enabled", "kataSandboxDevicePlugin.enabled", "validator.enabled", "cdi.enabled"}
OF_OWN_PROGRAMS = {
    "sandboxDevicePlugin.env",
    "validator.env",
    "validator.driver.env",
    "validator.toolkit.env",
    "validator.plugin.env",
}
"""Variables that the pods get, each of which is reported if the program does not read it."""
OTHER: dict[str, Plain] = {
    "imagePullPolicy": "Always",
    "maxUnavailable": "7",
    "kernelModuleType": "open",
    "updateStrategy": "OnDelete",
    "operator": "Exists",
}


def leaves(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Plain]]:
    """Yield each field with a value that no test and no default has."""
    if schema.properties:
        for name, inner in schema.properties.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, False if ".".join(path) in ON_BY_DEFAULT else value_of(schema, path[-1])


def value_of(schema: Schema, name: str) -> Plain:
    if schema.items is not None:
        return [element(schema.items)]
    if schema.additional_properties is not None:
        return {"example.com/key": value_of(schema.additional_properties, "")}
    if name in OTHER:
        return OTHER[name]
    if schema.enum:
        return schema.enum[-1]
    values: dict[str, Plain] = {"boolean": True, "integer": 77, "string": "value-77"}
    return values.get(schema.type, "77")


def element(schema: Schema) -> Plain:
    if schema.properties:
        return {name: value_of(field, name) for name, field in schema.properties.items() if name != "tolerationSeconds"}
    return value_of(schema, "")


def variables(**values: str) -> Plain:
    return [{"name": name, "value": value} for name, value in values.items()]


ALIASES: Plain = {"env": variables(P_GPU_ALIAS="pgpu", NVSWITCH_ALIAS="nvswitch")}


def options_of(name: str, check: str = "") -> set[str]:
    """Return the environment variables that a command's options read."""
    command = typer.main.get_group(program_for([name])).commands[name]
    if check:
        assert isinstance(command, TyperGroup)
        command = command.commands[check]
    found = (parameter.envvar or () for parameter in command.params)
    return {name for names in found for name in ([names] if isinstance(names, str) else names)}


def test_the_variables_that_gpuvirts_programs_read_are_known() -> None:
    assert options_of("node") == set(AGENT_READS)
    of_checks = (options_of("validate", check) for check in ("driver", "toolkit", "plugin"))
    assert set().union(*of_checks) == set(VALIDATOR_READS)


def with_field(path: tuple[str, ...], value: Plain) -> dict[str, Plain]:
    spec: dict[str, Plain] = json.loads(json.dumps(BASE))
    if path[0] == "kataSandboxDevicePlugin":
        spec["sandboxWorkloads"] = {"enabled": True, "mode": "kata"}
    inner = spec
    for name in path[:-1]:
        found = inner.setdefault(name, {})
        assert isinstance(found, dict)
        inner = found
    inner[path[-1]] = value
    if path[-2:] == ("kernelModuleConfig", "name"):
        inner["name"] = "params"
    parent = spec.get(path[0])
    # A component that is disabled by default is reported only if it is enabled.
    if isinstance(parent, dict) and path[0] in {"gds", "gdrcopy", "nodeStatusExporter"}:
        parent["enabled"] = True
    if path[-2:-1] in {("rdma",), ("hpcJobMapping",)}:
        inner["enabled"] = True
    return spec


def rendered(spec: Plain) -> list[bytes]:
    found = render(policy_of(spec), ALL_KINDS)
    return [encoded(manifest) for manifest in found.manifests]


def test_the_base_policy_has_no_unsupported_field() -> None:
    assert unsupported(BASE) == ()
    assert render(policy_of(BASE), ALL_KINDS).faults == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [pytest.param(path, value, id=".".join(path)) for path, value in leaves(spec_schema())],
)
def test_each_field_is_rendered_or_reported_as_unsupported(path: tuple[str, ...], value: Plain) -> None:
    spec = with_field(path, value)
    place = f"$.spec.{'.'.join(path)}"
    reported = [
        field for field in unsupported(spec) if f"{place}.".startswith(f"{field}.") or field.startswith(f"{place}[")
    ]
    if path[0] in NEVER:
        assert reported == (["$.spec." + ".".join(path)] if path[1:] == ("enabled",) else [])
    elif ".".join(path) in OF_OWN_PROGRAMS:
        assert reported == [f"{place}[value-77]"]
    elif ".".join(path) not in BY_THE_CONTROLLER:
        base = with_field(path[:1], spec[path[0]]) | {path[0]: BASE.get(path[0])}  # in the field's mode
        makes_a_difference = rendered(spec) != rendered(base) or spec == BASE
        assert makes_a_difference != bool(reported), (reported, spec)


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        ({}, ()),
        (None, ()),
        ({"driver": {}, "gds": {"enabled": False, "image": "x"}, "gdrcopy": None}, ()),
        ({"gds": {"enabled": True}}, ("$.spec.gds",)),
        ({"driver": {"upgradePolicy": {"autoUpgrade": True}}}, ("$.spec.driver.upgradePolicy",)),
        ({"driver": {"upgradePolicy": {"drain": {"enable": False}}}}, ()),
        ({"driver": {"enabled": False, "licensingConfig": {"secretName": "x"}}}, ()),
        ({"devicePlugin": {"mps": {"root": "/run/nvidia/mps"}}}, ()),
        ({"devicePlugin": {"mps": {"root": "/mps"}}}, ("$.spec.devicePlugin.mps.root",)),
        ({"sandboxWorkloads": {"mode": "kubevirt"}, "operator": {"defaultRuntime": "docker"}}, ()),
        ({"sandboxWorkloads": {"mode": "kata"}}, ()),
        ({"vfioManager": {"image": "x"}}, ()),
        ({"sandboxWorkloads": {"enabled": True}, "vfioManager": {"image": "x"}}, ("$.spec.vfioManager.image",)),
        ({"sandboxWorkloads": {"enabled": True}, "vfioManager": {"enabled": False}}, ()),
        ({"newer": {"a": [1]}, "empty": {"a": {}}}, ("$.spec.newer",)),
        ({"migManager": {"config": {"name": "x"}}}, ("$.spec.migManager",)),
        (
            {
                "kataManager": {"enabled": True, "config": {"artifactsDir": "/opt/kata"}},
                "ccManager": {"enabled": True, "defaultMode": "on", "image": "x"},
                "kataSandboxDevicePlugin": {"enabled": True, "version": "1"},
            },
            ("$.spec.ccManager.enabled", "$.spec.kataManager.enabled"),
        ),
        (
            {
                "sandboxWorkloads": {"enabled": True, "mode": "kata"},
                "kataManager": {"enabled": True},
                "kataSandboxDevicePlugin": {"enabled": True, "version": "1"},
            },
            ("$.spec.kataManager.enabled", "$.spec.kataSandboxDevicePlugin.version"),
        ),
        ({"ccManager": {"enabled": False, "defaultMode": "on"}, "kataManager": {"config": {}}}, ()),
        ({"sandboxWorkloads": {"enabled": True, "mode": "kata"}, "sandboxDevicePlugin": ALIASES}, ()),
        ({"sandboxWorkloads": {"enabled": True, "mode": "kata"}, "kataSandboxDevicePlugin": ALIASES}, ()),
        (
            {"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": ALIASES},
            (
                "$.spec.sandboxDevicePlugin.env[NVSWITCH_ALIAS]",
                "$.spec.sandboxDevicePlugin.env[P_GPU_ALIAS]",
            ),
        ),
        (
            {
                "sandboxWorkloads": {"enabled": True},
                "sandboxDevicePlugin": {"env": variables(GPUVIRT_LISTEN=":1", TZ="UTC", GPUVIRT_LISTN=":1", EMPTY="")},
                "vfioManager": {"env": variables(BIND_NVSWITCHES="true", A="1")},
                "validator": {"env": variables(X="1"), "plugin": {"env": variables(WITH_WORKLOAD="false")}},
            },
            (
                "$.spec.sandboxDevicePlugin.env[GPUVIRT_LISTN]",
                "$.spec.validator.env[X]",
                "$.spec.vfioManager.env[A]",
                "$.spec.vfioManager.env[BIND_NVSWITCHES]",
            ),
        ),
        (
            {"validator": {"plugin": {"env": variables(WITH_WORKLOAD="true")}}},
            ("$.spec.validator.plugin.env[WITH_WORKLOAD]",),
        ),
        ({"driver": {"env": variables(ANY="1")}}, ()),
    ],
)
def test_unsupported_paths_are_reported_once_at_the_topmost_level(spec: Plain, paths: tuple[str, ...]) -> None:
    assert unsupported(spec) == paths


@settings(deadline=None)
@given(specs())
def test_unsupported_fields_of_any_spec_are_reported(spec: object) -> None:
    found = unsupported(json.loads(json.dumps(spec)))
    assert all(field.startswith("$.spec.") for field in found)
    assert len(set(found)) == len(found)


def test_every_field_of_the_guides_policy_is_supported() -> None:
    assert unsupported(given_policy("guidepolicy.yaml")["spec"]) == ()


def test_a_node_selector_of_all_daemon_sets_is_reported() -> None:
    """NVIDIA's ClusterPolicy has no such field; in gpuvirt's, the nodes' labels decide."""
    assert unsupported({**BASE, "daemonsets": {"nodeSelector": {"a": "b"}}}) == ("$.spec.daemonsets.nodeSelector",)
