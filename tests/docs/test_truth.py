"""Documents, manifests and examples agree with the code."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

import gpuvirt_schedules
import gpuvirt_sim
from gpuvirt import __version__, documents
from gpuvirt.agent import metrics
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.facts.vgpu import SchedulerPolicy
from gpuvirt.model.desired.settings import Compat, Settings, check
from gpuvirt.model.desired.vgpuconfig import CONFIGS, VERSION, NoteCode, Sizes, parse
from gpuvirt.model.offers import discovery
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.hostspec import host_names, load_host
from tests.agent.node.simnode import IDS

ROOT = Path(__file__).parent.parent.parent
REFERENCE = "".join(path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))


class Mount(msgspec.Struct):
    """The fields of a mount that the tests read."""

    mountPath: str  # noqa: N815  Kubernetes' spelling
    readOnly: bool = False  # noqa: N815


class Container(msgspec.Struct):
    """The fields of a container that the tests read."""

    image: str
    securityContext: dict[str, object]  # noqa: N815  Kubernetes' spelling
    volumeMounts: tuple[Mount, ...]  # noqa: N815


class PodSpec(msgspec.Struct):
    """The fields of a pod that the tests read."""

    containers: tuple[Container]
    volumes: tuple[dict[str, dict[str, str] | str], ...]
    hostPID: bool = False  # noqa: N815  Kubernetes' spelling
    hostNetwork: bool = False  # noqa: N815
    securityContext: dict[str, object] = {}  # noqa: N815


@pytest.mark.parametrize("code", NoteCode)
def test_every_note_on_a_vgpu_config_is_explained_and_used(code: NoteCode) -> None:
    assert f"| `{code}` |" in REFERENCE
    assert any(f"NoteCode.{code.name}" in path.read_text() for path in (ROOT / "src").rglob("*.py"))


def test_every_setting_is_explained() -> None:
    for field in msgspec.structs.fields(Settings):
        assert f"`{field.name}" in REFERENCE
    for field in msgspec.structs.fields(Compat):
        assert f"`compat.{field.name}`" in REFERENCE
        assert f"compat.{field.name}" in (ROOT / "docs/drop-in.md").read_text()


def test_the_vgpu_config_in_the_reference_is_valid() -> None:
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL) if CONFIGS in block)
    assert VERSION in text
    assert parse(text, where="reference.md").notes == ()
    assert all(f"`{value}`" in REFERENCE for value in (*SchedulerPolicy, *Sizes))


def test_every_metric_is_explained() -> None:
    view = snapshot.take(build_host(load_host("4xL40S")), Settings(), IDS, SimClock())
    names = re.findall(r"# TYPE (\w+)", metrics.page(view, Telemetry()))
    assert [name for name in names if f"`{name}" not in REFERENCE] == []


FOR_CONTAINERS = {"nvidia.com/gpu", "nvidia.com/vgpu"}
"""The resources that NVIDIA's device plugin offers, and the units of shared GPUs."""


def offered_somewhere() -> set[str]:
    kernels = (build_host(load_host(name)) for name in host_names())
    views = (snapshot.take(kernel, Settings(), IDS, SimClock()) for kernel in kernels)
    return {resource.name for view in views for resource in view.resources}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_request_offered_resources(path: Path) -> None:
    text = path.read_text()
    names = set(re.findall(r"(?:deviceName: |resourceName: |limits: \{|requests\.)([\w./-]+)", text))
    classes = set(re.findall(r"deviceClassName: ([\w./-]+)", text))
    assert names | classes
    assert names <= offered_somewhere() | FOR_CONTAINERS
    assert all(f"  name: {name}\n" in (ROOT / "deploy/claims.yaml").read_text() for name in classes)


def pod_of(name: str) -> PodSpec:
    manifests = yaml.safe_load_all((ROOT / "deploy" / name).read_text())
    daemon_set = next(manifest for manifest in manifests if manifest["kind"] == "DaemonSet")
    return msgspec.convert(daemon_set["spec"]["template"]["spec"], PodSpec)


@pytest.mark.parametrize("name", ["node.yaml", "plugin-only.yaml", "discover.yaml"])
def test_manifests_have_the_image_of_this_version(name: str) -> None:
    assert pod_of(name).containers[0].image == f"gpuvirt:{__version__}"


def test_the_plugin_only_manifest_has_two_mounts_and_no_privileges() -> None:
    pod = pod_of("plugin-only.yaml")
    assert [volume["hostPath"] for volume in pod.volumes] == [
        {"path": "/var/lib/kubelet/device-plugins"},
        {"path": "/dev/vfio"},
    ]
    security = pod.containers[0].securityContext
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not pod.hostPID
    assert not pod.hostNetwork


def test_the_discoverer_has_no_rights_on_the_host() -> None:
    pod = pod_of("discover.yaml")
    assert pod.securityContext == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod.containers
    assert container.securityContext == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [(mount.mountPath, mount.readOnly) for mount in container.volumeMounts] == [
        ("/host/sys", True),
        ("/host/etc/os-release", True),
    ]
    assert [volume["hostPath"] for volume in pod.volumes] == [
        {"path": "/sys", "type": "Directory"},
        {"path": "/etc/os-release", "type": "File"},
    ]
    assert not pod.hostPID
    assert not pod.hostNetwork


def test_the_discoverers_labels_are_permitted_and_explained() -> None:
    labels = {discovery.PRESENT_LABEL, discovery.OS_ID_LABEL, discovery.OS_VERSION_LABEL}
    manifests = list(yaml.safe_load_all((ROOT / "deploy/discover.yaml").read_text()))
    policy = next(manifest for manifest in manifests if manifest["kind"] == "ValidatingAdmissionPolicy")
    own = next(variable["expression"] for variable in policy["spec"]["variables"] if variable["name"] == "own")
    assert set(msgspec.json.decode(own, type=tuple[str, ...])) == labels
    assert all(f"`{label}`" in REFERENCE for label in labels)


def test_the_settings_in_the_manifest_are_the_defaults() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "deploy/node.yaml").read_text()))
    text = next(manifest["data"]["node.yaml"] for manifest in manifests if manifest["kind"] == "ConfigMap")
    assert check(documents.parse(text, Settings, where="node.yaml"), where="node.yaml") == Settings()


def test_hami_core_is_installed_where_agents_look_for_it() -> None:
    library = Path(Settings().shares.hami_core.library)
    folder = ROOT / "deploy/hami-core"
    (volume,) = yaml.safe_load((folder / "daemonset.yaml").read_text())["spec"]["template"]["spec"]["volumes"]
    assert volume["hostPath"]["path"] == str(library.parent)
    assert f'/target/{library.name}"]' in (folder / "Dockerfile").read_text()


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets


OUTSIDE_DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*OUTSIDE_DOCS, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_and_anchors_exist(page: Path) -> None:
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page.read_text())):
        if target.startswith("https:"):
            continue
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found.read_text()), f"{target}#{anchor}"


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    names = {page.name for page in PAGES if page not in OUTSIDE_DOCS} - {"README.md"}
    assert [name for name in sorted(names) if f"]({name})" not in index] == []


def test_the_changelog_has_this_version() -> None:
    releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", releases[1])


def test_simulator_and_chart_have_this_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/chart/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert gpuvirt_sim.__version__ == __version__
    assert gpuvirt_schedules.__version__ == __version__
    for folder, needs in (("schedules", 1), ("simulator", 2)):
        text = (ROOT / folder / "pyproject.toml").read_text()
        assert re.findall(r'"gpuvirt[a-z-]*==([^"]+)"', text) == [__version__] * needs
