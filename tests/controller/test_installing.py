"""The kinds that belong to gpuvirt, and the files that an install refuses before it calls the API server."""

from pathlib import Path

import pytest

from gpuvirt.controller.definitions import (
    OURS,
    PART_OF,
    Definition,
    DefinitionCondition,
    DefinitionSpec,
    DefinitionStatus,
    is_ours,
    is_served,
)
from gpuvirt.controller.install.installing import read_kinds, read_policy
from gpuvirt.errors import ConfigError
from gpuvirt.kube.resources import Metadata

DEPLOY = Path(__file__).parent.parent.parent / "deploy"


@pytest.mark.parametrize(
    ("group", "labels", "ours"),
    [
        ("nvidia.com", {}, False),
        ("nvidia.com", {PART_OF: "gpu-operator"}, False),
        ("nvidia.com", {PART_OF: OURS}, True),
        ("gpuvirt.io", {}, True),
        ("other.gpuvirt.io", {}, False),
    ],
)
def test_a_kind_belongs_to_gpuvirt_by_its_group_or_its_label(group: str, labels: dict[str, str], ours: bool) -> None:
    assert is_ours(Definition(Metadata(labels=labels), DefinitionSpec(group))) is ours


@pytest.mark.parametrize(("status", "served"), [("True", True), ("False", False), (None, False)])
def test_a_kind_is_served_once_it_is_established(status: str | None, served: bool) -> None:
    conditions = [("NamesAccepted", "True"), *([("Established", status)] if status else [])]
    found = tuple(DefinitionCondition(kind, condition) for kind, condition in conditions)
    assert is_served(Definition(Metadata(), DefinitionSpec("gpuvirt.io"), DefinitionStatus(found))) is served


def test_gpuvirts_kinds_carry_the_part_of_label() -> None:
    kinds = read_kinds(DEPLOY / "chart/files/crds")
    assert [kind.metadata.name for kind in kinds] == [
        "clusterpolicies.nvidia.com",
        "gpunodes.gpuvirt.io",
        "vgpuschedules.gpuvirt.io",
    ]
    assert all(kind.metadata.labels == {PART_OF: OURS} for kind in kinds)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no CRDs; expected files \*.yaml"):
        read_kinds(tmp_path)
    with pytest.raises(ConfigError, match=r"\$.kind: expected a ClusterPolicy of nvidia.com/v1, found Custom"):
        read_policy(DEPLOY / "gpunodes.yaml")
    (tmp_path / "node.yaml").write_text("{apiVersion: v1, kind: Node, metadata: {name: a}, spec: {}}")
    with pytest.raises(ConfigError, match=r"node.yaml: .*expected a CustomResourceDefinition .* found Node of v1"):
        read_kinds(tmp_path)
