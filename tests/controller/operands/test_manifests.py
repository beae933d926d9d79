"""The operands' manifests: nothing in them is lost or left over, and a fault in them is named."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from gpuvirt import documents
from gpuvirt.controller.operands import bases
from gpuvirt.controller.operands.rendering import render
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds.podparts import Container
from gpuvirt.kube.kinds.workloads import DaemonSet, Service, encoded
from gpuvirt.kube.labels import AGENT_LABELS, DEPLOY, ENFORCEMENT_LABEL, NODE_LABEL, OS_LABEL
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.plain import Plain
from tests.controller.operands.operandaccounts import NAMES
from tests.controller.operands.policies import ALL_IMAGES, EVERY_OPERAND, sandbox

FILES = sorted(bases.FOLDER.iterdir())


def daemon_sets(**parts: Plain) -> list[DaemonSet]:
    """Return the DaemonSets of all operands."""
    found = render(sandbox(**{**EVERY_OPERAND, **parts}), ALL_IMAGES)
    assert found.faults == ()
    return [manifest for manifest in found.manifests if isinstance(manifest, DaemonSet)]


def read(file: Path) -> DaemonSet | Service:
    return bases.service(file.stem) if file.stem.endswith("-service") else bases.daemon_set(file.stem)


def containers(found: DaemonSet) -> Iterator[Container]:
    yield from (*bases.pod_of(found).init_containers, *bases.pod_of(found).containers)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_field_of_a_manifest_is_lost(file: Path) -> None:
    written: Plain = yaml.safe_load(file.read_text())
    assert msgspec.json.decode(encoded(read(file))) == written


def test_every_manifest_is_of_an_operand() -> None:
    found = render(sandbox(**EVERY_OPERAND), ALL_IMAGES)
    operands = {manifest.metadata.labels["app"] for manifest in found.manifests if isinstance(manifest, DaemonSet)}
    assert operands == {read(file).metadata.name for file in FILES}


@pytest.mark.parametrize(
    ("text", "faulty", "reported"),
    [
        (
            "mountPath: /var",
            "mountpath: /var",
            r"\$\.spec\.template\.spec\.containers\[0\]\.volumeMounts\[0\]\.mountpath: no such key",
        ),
        (
            'KUBERNETES, value: "true"',
            "KUBERNETES, value: true",
            r"\$\.spec\.template\.spec\.containers\[0\]\.env\[1\]\.value: expected text, found true",
        ),
        ("image: dcgm", "imag: dcgm", r"containers\[0\]\.imag: no such key; .* did you mean image\?"),
    ],
)
def test_a_fault_has_its_file_line_and_path(tmp_path: Path, text: str, faulty: str, reported: str) -> None:
    file = tmp_path / "dcgm-exporter.yaml"
    file.write_text((bases.FOLDER / file.name).read_text().replace(text, faulty, 1))
    with pytest.raises(ConfigError, match=rf"dcgm-exporter\.yaml:\d+: .*{reported}"):
        documents.load(file, DaemonSet)


def test_no_container_keeps_the_manifests_image() -> None:
    for found in daemon_sets():
        for container in containers(found):
            assert container.image == ALL_IMAGES.image or container.image.startswith("r/"), container.name


def test_volumes_are_in_the_folders_that_the_policy_names() -> None:
    paths: Plain = {"rootFS": "/x", "driverInstallDir": "/y", "kubeletRootDir": "/z"}
    used = set[str]()
    for found in daemon_sets(hostPaths=paths):
        for volume in bases.pod_of(found).volumes:
            path = volume.host_path.path if volume.host_path is not None else ""
            assert path != "/"
            assert not path.startswith(("/run/nvidia/driver", "/var/lib/kubelet")), (found.metadata.name, path)
            used.add(path[:2])
    assert used >= {"/x", "/y", "/z"}


def test_pods_have_accounts_that_exist() -> None:
    for found in daemon_sets():
        assert bases.pod_of(found).service_account_name in {*NAMES, "gpuvirt-node"}


def test_manifests_select_nodes_by_labels_that_nodes_have() -> None:
    for found in daemon_sets():
        for label, value in bases.pod_of(found).node_selector.items():
            assert label.startswith(DEPLOY) or label in {NODE_LABEL, OS_LABEL, "kubernetes.io/os"}
            assert label != NODE_LABEL or value in {"true", AGENT_LABELS}


def test_the_mps_daemon_runs_where_shares_are_limited_by_it() -> None:
    affinity = bases.pod_of(bases.daemon_set("mps")).affinity
    assert affinity is not None
    (term,) = affinity.node_affinity.required.node_selector_terms
    (label,) = term.match_expressions
    assert label.key == ENFORCEMENT_LABEL
    assert set(label.values) == {str(enforcement) for enforcement in Enforcement if enforcement.has_daemon}


def test_validators_read_the_file_that_the_driver_writes() -> None:
    (driver,) = bases.pod_of(bases.daemon_set("driver")).containers
    assert driver.startup_probe is not None
    assert driver.startup_probe.exec is not None
    assert driver.lifecycle is not None
    for name in ("validator", "toolkit"):
        check = bases.pod_of(bases.daemon_set(name)).init_containers[0]
        (file,) = (variable.value for variable in check.env if variable.name == "GPUVIRT_DRIVER_STARTED")
        assert file is not None
        assert driver.startup_probe.exec.command[-1].endswith(f" && touch {file}")
        assert driver.lifecycle.pre_stop.exec.command[-1] == f"rm -f {file}"
