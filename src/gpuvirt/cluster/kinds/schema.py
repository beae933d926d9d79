"""Structural schemas of our kinds, from the types that we decode them into: the two can't differ.

Source: Kubernetes' CustomResourceDefinitions, "Specifying a structural schema": no references, no union of types but
that of a text and a whole number, and `nullable` where a value may be null. Defaults are left out: a server would write
them into objects that lack them. What is said of a type beside (`extra_json_schema`) may be an `enum` or a `pattern` by
which a server refuses, and we don't.
"""

import inspect as python
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from gpuvirt.cluster.kinds.parts import Part


class Rule(msgspec.Struct, frozen=True):
    """What an object must satisfy, in CEL, and what is said where it does not."""

    rule: str
    message: str


class Schema(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The fields of JSONSchemaProps (apiextensions.k8s.io/v1) that our kinds need."""

    description: str = ""
    type: str = ""
    nullable: bool = False
    pattern: str = ""
    max_length: int | None = None
    enum: tuple[str, ...] = ()
    properties: dict[str, "Schema"] = {}
    additional_properties: "Schema | None" = None
    required: tuple[str, ...] = ()
    items: "Schema | None" = None
    max_items: int | None = None
    int_or_string: bool = msgspec.field(default=False, name="x-kubernetes-int-or-string")
    keeps_unknown: bool = msgspec.field(default=False, name="x-kubernetes-preserve-unknown-fields")
    list_type: str = msgspec.field(default="", name="x-kubernetes-list-type")
    list_map_keys: tuple[str, ...] = msgspec.field(default=(), name="x-kubernetes-list-map-keys")
    rules: tuple[Rule, ...] = msgspec.field(default=(), name="x-kubernetes-validations")


class UnfitTypeError(TypeError):
    """A type that no structural schema describes."""


def structural(kind: type) -> Schema:
    """Return the schema of a type; raise UnfitTypeError."""
    return _schema(inspect.type_info(kind))


def without_nulls(schema: Schema) -> Schema:
    """Return the schema of what is never null: a server takes nulls away before it stores, and rules see none."""
    return replace(
        schema,
        nullable=False,
        properties={name: without_nulls(one) for name, one in schema.properties.items()},
        items=without_nulls(schema.items) if schema.items is not None else None,
    )


def description_of(kind: type) -> str:
    """Return what is said of a type: the first paragraph of its docstring."""
    return (python.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def _schema(found: inspect.Type) -> Schema:
    schema: Schema
    match found:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            schema = _told(_schema(inner), extra or {})
        case inspect.UnionType(types=types):
            schema = _of_union(types)
        case inspect.StructType():
            schema = _of_struct(found)
        case inspect.VarTupleType(item_type=item):
            schema = Schema(type="array", items=_schema(item))
        case inspect.DictType(key_type=inspect.StrType(), value_type=value):
            schema = Schema(type="object", additional_properties=_schema(value))
        case inspect.EnumType(cls=cls):
            schema = Schema(type="string", enum=tuple(str(one.value) for one in cls))
        case inspect.StrType(pattern=pattern):
            schema = Schema(type="string", pattern=pattern or "")
        case inspect.IntType() | inspect.BoolType():
            schema = Schema(type="integer" if isinstance(found, inspect.IntType) else "boolean")
        case _:
            raise UnfitTypeError(f"no structural schema describes {found}")
    return schema


def _of_struct(found: inspect.StructType) -> Schema:
    return Schema(
        description=description_of(found.cls),
        type="object",
        properties={field.encode_name: _schema(field.type) for field in found.fields},
        required=tuple(field.encode_name for field in found.fields if field.required),
        keeps_unknown=issubclass(found.cls, Part) and found.cls.keeps_unknown,
    )


def _of_union(types: Sequence[inspect.Type]) -> Schema:
    if {type(one) for one in types} == {inspect.StrType, inspect.IntType}:
        return Schema(int_or_string=True)
    return replace(_schema(_only(types)), nullable=True)


def _told(schema: Schema, said: Mapping[str, object]) -> Schema:
    """Return a schema with what is said of it beside."""
    enum = said.get("enum", schema.enum)
    return replace(
        schema,
        description=str(said.get("description", schema.description)),
        pattern=str(said.get("pattern", schema.pattern)),
        enum=tuple(str(one) for one in enum) if isinstance(enum, list | tuple) else (),
    )


def _only(types: Sequence[inspect.Type]) -> inspect.Type:
    """Return the one type that a value has where it is not null."""
    others = [one for one in types if not isinstance(one, inspect.NoneType)]
    if len(others) != 1 or len(others) == len(types):
        raise UnfitTypeError(f"a value is of one type, or null; found {types}")
    return others[0]
