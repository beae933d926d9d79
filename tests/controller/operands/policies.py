"""Policies for tests: the full policy, and any policy that the API server would accept."""

from pathlib import Path

import msgspec
import yaml
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, StoredPolicy, read_policy
from gpuvirt.plain import Plain

GIVEN = Path(__file__).parents[2] / "kube"
KIND = Path(__file__).parents[3] / "deploy/clusterpolicies.yaml"
INPUTS = RenderInputs(
    ControllerSettings("gpu-operator"),
    "registry.example/gpuvirt:1",
    vgpu_os=frozenset({"ubuntu22.04"}),
    config_maps={"kernel-module-params": ("nvidia.conf", "b.conf"), "params": ("nvidia.conf",)},
)
ALL_KINDS = replace(
    INPUTS,
    settings=replace(INPUTS.settings, labels_vgpu_types=True),
    container_os=frozenset({"ubuntu22.04", "rhel9"}),
    has_container_nodes=True,
)
"""A cluster that has nodes for containers, too, which are labelled with their vGPU types."""
ALL_IMAGES = replace(
    ALL_KINDS,
    settings=replace(
        ALL_KINDS.settings,
        images={
            f"{name}_IMAGE": f"r/{name.lower()}:1"
            for name in (
                *("DRIVER", "DRIVER_MANAGER", "CONTAINER_TOOLKIT", "DEVICE_PLUGIN"),
                *("DCGM", "DCGM_EXPORTER", "GFD", "VGPU_MANAGER"),
            )
        },
    ),
)
"""The same, with an image of each operand in the controller's environment."""
EVERY_OPERAND: dict[str, Plain] = {
    "sandboxDevicePlugin": {"shares": {"mps": {"enabled": True}}},
    "vgpuManager": {"enabled": True},
}
"""The parts of a policy with which every operand runs."""
NAMES = st.text("abcxyz0123456789-./", max_size=12)
QUANTITIES = st.sampled_from([1, 0, "200Mi", "500m", "1.5"])


class Schema(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of a structural schema that values are made of."""

    type: str = ""
    enum: tuple[str, ...] = ()
    properties: dict[str, "Schema"] = {}
    additional_properties: "Schema | None" = None
    required: tuple[str, ...] = ()
    items: "Schema | None" = None
    int_or_string: bool = msgspec.field(default=False, name="x-kubernetes-int-or-string")


def given(name: str) -> dict[str, dict[str, Plain]]:
    """Return a policy of the API server's tests."""
    found: dict[str, dict[str, Plain]] = yaml.safe_load((GIVEN / name).read_text())
    return found


def policy_of(spec: object) -> ClusterPolicy:
    """Return a policy with a spec, as the API server stores it."""
    written = {"metadata": {"name": "cluster-policy", "uid": "0000-1111"}, "spec": spec}
    found = read_policy(msgspec.json.decode(msgspec.json.encode(written), type=StoredPolicy))
    assert isinstance(found, ClusterPolicy), found
    return found


def sandbox(**parts: object) -> ClusterPolicy:
    """Return a policy for VMs."""
    return policy_of({"sandboxWorkloads": {"enabled": True}, **parts})


def full() -> ClusterPolicy:
    """Return the policy that sets every field."""
    return policy_of(given("fullpolicy.yaml")["spec"])


def spec_schema() -> Schema:
    """Return the schema of a policy's spec."""
    (version,) = yaml.safe_load(KIND.read_text())["spec"]["versions"]
    return msgspec.convert(version["schema"]["openAPIV3Schema"]["properties"]["spec"], Schema)


def specs() -> st.SearchStrategy[object]:
    """Return specs of all shapes that the schema allows, and such without the keys that it requires."""
    return _values(replace(spec_schema(), required=()))


def _values(schema: Schema) -> st.SearchStrategy[object]:
    if schema.int_or_string:
        return QUANTITIES
    if schema.enum:
        return st.sampled_from(schema.enum)
    if schema.items is not None:
        return st.lists(_values(schema.items), max_size=3)
    if schema.additional_properties is not None:
        return st.dictionaries(NAMES, _values(schema.additional_properties), max_size=2)
    if schema.properties:
        values = {name: _values(field) for name, field in schema.properties.items()}
        needed = {name: values.pop(name) for name in schema.required}
        return st.fixed_dictionaries(needed, optional=values)
    return {"string": NAMES, "integer": st.integers(0, 9), "boolean": st.booleans()}[schema.type]
