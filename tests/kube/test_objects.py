"""An immutable mapping of objects, compared with a `dict`."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.kinds.parts import OwnerReference
from gpuvirt.kube.objects import ObjectKey, ObjectMap
from gpuvirt.kube.resources import Metadata

keys = st.builds(ObjectKey, st.sampled_from(["", "a", "b"]), st.integers(0, 300).map(str))
changes = st.lists(st.tuples(keys, st.integers(0, 5) | st.none()), max_size=200)


def node(version: int) -> Node:
    return Node(Metadata(resource_version=str(version)))


@given(st.dictionaries(keys, st.integers(0, 5).map(node), max_size=300), changes)
def test_an_object_map_behaves_as_a_dict_and_never_changes_earlier_maps(
    first: dict[ObjectKey, Node], changes: Sequence[tuple[ObjectKey, int | None]]
) -> None:
    truth, found = dict(first), ObjectMap.of(first)
    history = [(dict(truth), found)]
    for key, version in changes:
        if version is None:
            truth.pop(key, None)
            found = found.without(key)
        else:
            truth[key] = node(version)
            found = found.with_object(key, node(version))
        history.append((dict(truth), found))
    for expected, objects in history:
        assert objects == expected
        assert len(objects) == len(expected)
        assert set(objects) == expected.keys()
        assert dict(objects.items()) == expected
        assert sorted(stored.metadata.resource_version for stored in objects.values()) == sorted(
            stored.metadata.resource_version for stored in expected.values()
        )
        assert all(objects.get(key) == expected.get(key) for key, _ in changes)


def test_an_owner_that_another_program_wrote_is_read() -> None:
    written = {"apiVersion": "v1", "kind": "Service", "name": "a", "uid": "1", "blockOwnerDeletion": True}
    owner = msgspec.convert(written, OwnerReference)
    assert (owner.kind, owner.name) == ("Service", "a")
