"""Go programs write null for absent fields: every shape of an API object reads null as absent."""

import importlib
import pkgutil
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

import gpuvirt.kube
from gpuvirt import documents, nulls
from gpuvirt.agent.kubelet.checkpoint import Checkpoint
from gpuvirt.controller import definitions
from gpuvirt.controller.definitions import Definition
from gpuvirt.controller.deployment import StoredObject
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.setup import KubeletConfig
from gpuvirt.kube.access.execplugin import ExecCredential
from gpuvirt.kube.access.kubeconfig import KubeConfig
from gpuvirt.kube.failures import Status
from gpuvirt.kube.kinds import gpunode, podparts, workloads
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, StoredPolicy, read_policy
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import DesiredLabels, LabelPatch, patched
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.kubevirt import kubevirt
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.plain import Plain
from gpuvirt_schedules.controller import nodemarks
from tests.thoroughness import examples

ONLY_WRITTEN = {workloads.__name__, podparts.__name__}
"""Modules of what is rendered and applied, and never read."""
PATCHES = {f"{nodemarks.__name__}.MarksPatch"}
"""Patches in which a null deletes a field."""

Pair = tuple[Plain, Plain]
"""A document with nulls, and the same without the fields that are null."""


def _structs(of: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for struct in of.__subclasses__():
        yield struct
        yield from _structs(struct)


def _name(shape: type[msgspec.Struct]) -> str:
    return f"{shape.__module__}.{shape.__qualname__}"


def shapes() -> list[type[msgspec.Struct]]:
    """Every shape that an object is decoded into: shapes with metadata, and documents without."""
    for module in pkgutil.walk_packages(gpuvirt.kube.__path__, f"{gpuvirt.kube.__name__}."):
        importlib.import_module(module.name)
    prefix = f"{gpuvirt.kube.__name__}."
    here = (shape for shape in _structs(msgspec.Struct) if shape.__module__.startswith(prefix))
    read = (shape for shape in here if shape.__module__ not in ONLY_WRITTEN and _name(shape) not in PATCHES)
    objects = {shape for shape in read if "metadata" in shape.__struct_fields__}
    documents_of_their_own: set[type[msgspec.Struct]] = {
        Status,
        Checkpoint,
        KubeletConfig,
        KubeVirt,
        ExecCredential,
        KubeConfig,
    }
    return sorted(objects | documents_of_their_own, key=_name)


SCALARS: dict[type[inspect.Type], st.SearchStrategy[Plain]] = {
    inspect.BoolType: st.booleans(),
    inspect.IntType: st.integers(0, 99),
    inspect.FloatType: st.integers(0, 99),
    inspect.BytesType: st.just("YQ=="),
    inspect.DateTimeType: st.just(datetime(2026, 1, 1, tzinfo=UTC).isoformat()),
    inspect.RawType: st.sampled_from([1, "x", [None], {"null": None}]),
    inspect.CustomType: st.just("x"),
    inspect.AnyType: st.sampled_from([1, "x", [None], {"null": None}]),
}
NULL: st.SearchStrategy[Pair] = st.just((None, None))


def takes_null(of: inspect.Type) -> bool:
    alternatives = of.types if isinstance(of, inspect.UnionType) else (of,)
    return any(
        isinstance(alternative, inspect.NoneType | inspect.AnyType | inspect.RawType | inspect.CustomType)
        for alternative in alternatives
    )


def pairs(of: inspect.Type) -> st.SearchStrategy[Pair]:
    """Return documents of a type, each with nulls and without nulls."""
    match of:
        case inspect.Metadata():
            return pairs(of.type)
        case inspect.UnionType():
            return st.one_of(*(pairs(member) for member in of.types if not isinstance(member, inspect.NoneType)))
        case inspect.StructType():
            return _objects(of)
        case inspect.DictType():
            values = pairs(of.value_type) if takes_null(of.value_type) else pairs(of.value_type) | NULL
            return st.dictionaries(st.sampled_from("abc"), values, max_size=2).map(_split)
        case inspect.ListType() | inspect.VarTupleType() | inspect.FrozenSetType():
            items = st.lists(pairs(of.item_type), max_size=2)
            return items.map(lambda found: ([item for item, _ in found], [item for _, item in found]))
        case inspect.EnumType():
            return st.sampled_from([member.value for member in of.cls]).map(lambda member: (member, member))
        case inspect.StrType():
            texts = st.from_regex(of.pattern) if of.pattern else st.sampled_from(["", "x", "null"])
            return texts.map(lambda member: (member, member))
        case _:
            return SCALARS[type(of)].map(lambda member: (member, member))


def _objects(of: inspect.StructType) -> st.SearchStrategy[Pair]:
    required = {field.encode_name: pairs(field.type) for field in of.fields if field.required}
    optional = {field.encode_name: pairs(field.type) | NULL for field in of.fields if not field.required}
    return st.fixed_dictionaries(required, optional=optional).map(_split)


def _split(found: dict[str, Pair]) -> Pair:
    with_nulls: dict[str, Plain] = {key: value for key, (value, _) in found.items()}
    without: dict[str, Plain] = {key: two for key, (_, two) in found.items() if two is not None}
    return with_nulls, without


@pytest.mark.parametrize("shape", shapes(), ids=_name)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_null_in_any_optional_field_reads_as_absent(shape: type[msgspec.Struct], data: st.DataObject) -> None:
    with_nulls, without = data.draw(pairs(inspect.type_info(shape)))
    expected = msgspec.json.decode(msgspec.json.encode(without), type=shape)
    assert nulls.decode(msgspec.json.encode(with_nulls), shape) == expected


@settings(deadline=None)
@given(pairs(inspect.type_info(ClusterPolicy)))
def test_nulls_anywhere_in_a_policy_spec_read_as_absent(pair: Pair) -> None:
    policies = [read_policy(nulls.decode(msgspec.json.encode(item), StoredPolicy)) for item in pair]
    assert isinstance(policies[0], ClusterPolicy)
    assert policies[0] == policies[1]


@settings(deadline=None)
@given(pairs(inspect.type_info(KubeVirt)))
def test_nulls_anywhere_in_a_printed_kubevirt_read_as_absent(pair: Pair) -> None:
    written = [{**item, "kind": "KubeVirt"} for item in pair if isinstance(item, dict)]
    found = [kubevirt.parse(msgspec.json.encode(document).decode(), where="-") for document in written]
    assert found[0] == found[1]


def test_a_new_kind_with_null_conditions_is_decoded() -> None:
    answer = (
        b'{"metadata":{"name":"gpunodes.gpuvirt.io"},"spec":{"group":"gpuvirt.io"},'
        b'"status":{"conditions":null,"acceptedNames":{"plural":"","kind":""},"storedVersions":["v1alpha1"]}}'
    )
    assert nulls.decode(answer, Definition).status.conditions == ()


def test_null_in_a_required_field_is_reported_with_its_path() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"Expected `str`, got `null` - at `\$.conditions\[0\].type`"):
        nulls.decode(b'{"conditions": [{"type": null, "status": "True"}]}', definitions.DefinitionStatus)


def test_null_as_a_list_item_is_not_dropped() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"got `null` - at `\$.gpus\[0\]`"):
        nulls.decode(b'{"gpus": [null]}', gpunode.Spec)


def test_raw_fields_keep_their_nulls() -> None:
    """Fields of other programs are written back unchanged, and an explicit null is no default."""
    stored = nulls.decode(b'{"metadata":{"labels":null},"spec":{"a":null,"b":[null]}}', StoredObject)
    assert bytes(stored.spec) == b'{"a":null,"b":[null]}'
    policy = nulls.decode(
        b'{"metadata":{},"spec":{"sandboxDevicePlugin":{"enabled":null}},"status":null}', StoredPolicy
    )
    assert bytes(policy.spec) == b'{"sandboxDevicePlugin":{"enabled":null}}'
    found = read_policy(policy)
    assert isinstance(found, ClusterPolicy)
    assert found.spec.sandbox_device_plugin.enabled is None


def test_a_node_whose_labels_are_null_can_be_patched() -> None:
    whole = {"metadata": msgspec.Raw(b'{"labels":null,"annotations":{"a":"b"},"ownerReferences":null}')}
    written = patched(whole, LabelPatch(DesiredLabels({"x": "y"}, {"c": "d"})))
    assert bytes(written["metadata"]) == (
        b'{"labels":{"x":"y"},"annotations":{"a":"b","c":"d"},"ownerReferences":null}'
    )


def test_nulls_in_user_files_and_state_files_are_faults() -> None:
    """A user who wrote a key without a value made a mistake, and our own files never contain null."""
    with pytest.raises(ConfigError, match="found nothing"):
        documents.parse("labels:", Metadata, where="f")
    with pytest.raises(DamagedError, match="got `null`"):
        documents.from_json(b'{"labels": null}', Metadata)


def test_a_document_without_relevant_nulls_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods and nodes have nulls in fields that gpuvirt does not decode; they cost nothing."""
    monkeypatch.delattr(nulls, "removed")
    body = b'{"metadata":{"name":"a"},"status":{"conditions":[{"type":"Ready","lastProbeTime":null}],"allocatable":{}}}'
    assert nulls.decode(body, Node).metadata.name == "a"
