"""The images that an installation pulls, for clusters without internet access: from manifests and their policy.

Manifests are what `helm template` prints: workloads, and the ClusterPolicy in its ConfigMap. The images of operands
come from the controller's own renderers, so that they are the same as in its deployments.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from gpuvirt import documents, plain
from gpuvirt.controller.operands.inputs import RenderInputs, spec_faults
from gpuvirt.controller.operands.rendering import config_maps_of, render
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds import clusterpolicy
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault, StoredPolicy, read_policy
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.kube.labels import OS_LABEL

WORKLOADS = {"Deployment", "DaemonSet", "StatefulSet", "Job"}
POLICY_KEY = "clusterpolicy.yaml"
"""The key of the chart's ConfigMap that has the ClusterPolicy."""
CONTROLLER_IMAGE = "GPUVIRT_IMAGE"
UNKNOWN_OS = "OS"
_SEPARATOR = re.compile(r"^---(?:[ \t].*)?$", re.MULTILINE)


class _Variable(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class _Container(msgspec.Struct, frozen=True):
    image: str = ""
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()


class _Pod(msgspec.Struct, frozen=True, rename="camel"):
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()


class _Template(msgspec.Struct, frozen=True):
    spec: _Pod = _Pod()


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    template: _Template = _Template()
    containers: tuple[_Container, ...] = ()
    init_containers: tuple[_Container, ...] = ()


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""
    metadata: _Named = _Named()


class _Workload(msgspec.Struct, frozen=True):
    spec: _Spec = _Spec()


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] = {}


class ImageInputs(msgspec.Struct, frozen=True):
    """The inputs on which images depend besides the manifests."""

    systems: frozenset[str] = frozenset()
    """The operating systems of the nodes with GPUs, as drivers' images have them in their tags: `ubuntu22.04`."""
    image: str = ""
    """gpuvirt's image, for a ClusterPolicy without the chart's manifests."""


class _Found(msgspec.Struct, frozen=True):
    """The content of all manifests."""

    containers: tuple[_Container, ...]
    policies: tuple[ClusterPolicy, ...]


def images_of(manifests: Iterable[tuple[str, str]], inputs: ImageInputs) -> tuple[str, ...]:
    """Return all images of manifests (origin and text), each once, sorted; raise ConfigError."""
    found = _found(manifests)
    named = {container.image for container in found.containers if container.image}
    render_inputs = _render_inputs(found.containers, inputs)
    for policy in found.policies:
        named |= _of_operands(policy, render_inputs, inputs)
    if not named:
        raise ConfigError(
            "names no image; expected the output of helm template, or a ClusterPolicy", where="the manifests"
        )
    return tuple(sorted(named))


def operands_of(manifests: Iterable[tuple[str, str]], image: str) -> tuple[ClusterPolicy, RenderInputs]:
    """Return the ClusterPolicy of manifests, and the inputs by which a controller renders it; raise ConfigError."""
    found = _found(manifests)
    if len(found.policies) != 1:
        expected = "expected the output of helm template, or a ClusterPolicy"
        raise ConfigError(f"{expected}; found {len(found.policies)} ClusterPolicies", where="the manifests")
    (policy,) = found.policies
    inputs = _render_inputs(found.containers, ImageInputs(image=image))
    return policy, replace(inputs, config_maps=dict.fromkeys(config_maps_of(policy), ()))


def _found(manifests: Iterable[tuple[str, str]]) -> _Found:
    containers, policies = list[_Container](), list[ClusterPolicy]()
    for where, text in manifests:
        for kind, place, document in _documents(where, text):
            if kind == clusterpolicy.KIND:
                policies.append(_policy(document, place))
            elif kind in WORKLOADS or kind == "Pod":
                spec = documents.parse(document, _Workload, where=place, null_is_absent=True).spec
                pod = spec.template.spec if kind in WORKLOADS else spec
                containers += (*pod.init_containers, *pod.containers)
            elif kind == "ConfigMap":
                data = documents.parse(document, _ConfigMap, where=place, null_is_absent=True).data
                policies += [_policy(data[POLICY_KEY], f"{place}, {POLICY_KEY}")] if POLICY_KEY in data else []
    return _Found(tuple(containers), tuple(policies))


def _documents(where: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the origin and the text of each document."""
    for document in _SEPARATOR.split(text):
        if document.strip():
            found = documents.parse(document, _Kind, where=where, null_is_absent=True)
            yield found.kind, f"{where}, {found.kind} {found.metadata.name}", document


def _policy(text: str, where: str) -> ClusterPolicy:
    content = plain.read(text, where=where).content
    policy = read_policy(documents.from_json(msgspec.json.encode(content), StoredPolicy, null_is_absent=True))
    faults = [policy] if isinstance(policy, SpecFault) else [*spec_faults(policy.spec)]
    if isinstance(policy, SpecFault) or faults:
        raise ConfigError(faults[0].message, where=where, path=faults[0].path)
    return policy


def _render_inputs(containers: Iterable[_Container], inputs: ImageInputs) -> RenderInputs:
    """Return the render inputs of the controller in the manifests."""
    variables, beside = dict[str, str](), False
    for container in containers:
        if any(variable.name == CONTROLLER_IMAGE for variable in container.env):
            variables = {variable.name: variable.value for variable in container.env}
            beside = "--coexist" in container.args
    systems = inputs.systems or frozenset({UNKNOWN_OS})
    images = {name: value for name, value in variables.items() if name.endswith("_IMAGE")}
    settings = ControllerSettings(namespace="", images=images, coexists=beside)
    return RenderInputs(
        settings,
        variables.get(CONTROLLER_IMAGE) or inputs.image,
        vgpu_os=systems,
        container_os=systems,
        has_container_nodes=True,
    )


def _of_operands(policy: ClusterPolicy, render_inputs: RenderInputs, inputs: ImageInputs) -> set[str]:
    """Return the images of all operands that a policy enables."""
    known = dict.fromkeys(config_maps_of(policy), ())
    rendered = render(policy, replace(render_inputs, config_maps=known))
    where = f"ClusterPolicy {policy.metadata.name}"
    for fault in rendered.faults:
        raise ConfigError(fault.because.message, where=where, path=fault.because.path)
    named = set[str]()
    for manifest in rendered.manifests:
        if isinstance(manifest, DaemonSet):
            pod = manifest.spec.template.spec
            if OS_LABEL in pod.node_selector and not inputs.systems:
                raise ConfigError(
                    f"the image of {manifest.metadata.name.removesuffix('-os')} is built for an operating system; name"
                    " each one of your nodes with GPUs: --os ubuntu22.04 --os rhel9",
                    where="--os",
                )
            named |= {container.image for container in (*pod.init_containers, *pod.containers)}
    return named
