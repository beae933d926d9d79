"""A failed comparison of msgspec Structs names the fields that differ."""

from dataclasses import dataclass

import pytest
from msgspec import Struct

from tests.comparison import explain


class Port(Struct, frozen=True):
    number: int
    name: str = "http"


class Service(Struct, frozen=True):
    name: str
    ports: tuple[Port, ...] = ()
    labels: dict[str, str] = {}
    zones: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cluster:
    service: Service
    nodes: int = 1


class Anonymous(Struct, eq=False):
    number: int


def lines(left: object, right: object) -> list[str]:
    """Return the differences that are named, without the line of both values."""
    explained = explain(left, right)
    assert explained is not None
    return explained[1:]


def test_pytest_names_the_fields_of_a_failed_assertion() -> None:
    with pytest.raises(AssertionError) as failed:
        assert Service("web", (Port(80), Port(443))) == Service("web", (Port(80), Port(8443, "https")))
    message = str(failed.value)
    assert "ports[1].number: 443 != 8443" in message
    assert "ports[1].name: 'http' != 'https'" in message
    assert "ports[0]" not in message


def test_fields_of_structs_in_structs_are_named() -> None:
    left = Service("web", (Port(80),), {"app": "a", "tier": "1"}, frozenset({"x", "y"}))
    right = Service("api", (Port(81), Port(82)), {"app": "b", "team": "2"}, frozenset({"y", "z"}))
    assert lines(left, right) == [
        ".name: 'web' != 'api'",
        ".ports[0].number: 80 != 81",
        ".ports[1]: nothing != Port(number=82, name='http')",
        ".labels['app']: 'a' != 'b'",
        ".labels['tier']: '1' != nothing",
        ".labels['team']: nothing != '2'",
        ".zones has: 'x' != nothing",
        ".zones has: nothing != 'z'",
    ]


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [
        ([Port(1), Port(2)], [Port(1), Port(3)], "[1].number"),
        ({"a": Port(1)}, {"a": Port(2)}, "['a'].number"),
        (Cluster(Service("a")), Cluster(Service("b")), ".service.name"),
    ],
)
def test_structs_in_other_values_are_named(left: object, right: object, place: str) -> None:
    assert [line.partition(":")[0] for line in lines(left, right)] == [place]


def test_structs_of_two_classes_are_shown_whole() -> None:
    assert lines(Port(1), Anonymous(1))[0].startswith("value: Port(number=1, name='http') != ")


def test_unequal_structs_with_equal_fields_are_shown_whole() -> None:
    assert lines(Anonymous(1), Anonymous(1)) == ["value: Anonymous(number=1) != Anonymous(number=1)"]


def test_long_values_are_shown_whole_only_with_vv() -> None:
    left, right = Port(1, "a" * 1000), Port(1, "b" * 1000)
    assert max(len(line) for line in explain(left, right) or ()) < 300
    assert f".name: {left.name!r} != {right.name!r}" in (explain(left, right, 2) or ())


@pytest.mark.parametrize(("left", "right"), [(1, 2), ("a", "b"), ([1], [2]), ({1}, {2})])
def test_pytest_explains_values_without_structs_itself(left: object, right: object) -> None:
    assert explain(left, right) is None


def test_a_container_that_differs_elsewhere_is_explained_by_pytest() -> None:
    assert explain([Port(1), 2], [Port(1), 3]) is None
