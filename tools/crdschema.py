"""Structural schemas of gpuvirt's kinds, made from the types that the objects are decoded into, so that both agree.

Source: Kubernetes' CustomResourceDefinitions, "Specifying a structural schema": no references, no union of types except
string and integer, and `nullable` where a value may be null. Defaults are left out, because the API server would write
them into objects that lack the field. A field's `extra_json_schema` may add an `enum` or a `pattern` that the API
server checks and the decoder does not.
"""

import inspect as python
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from gpuvirt.kube.kinds.parts import Part


class Rule(msgspec.Struct, frozen=True):
    """A validation rule in CEL, and the message for objects that violate it."""

    rule: str
    message: str


class Schema(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The fields of JSONSchemaProps (apiextensions.k8s.io/v1) that gpuvirt's kinds need."""

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
    min_items: int | None = None
    max_items: int | None = None
    int_or_string: bool = msgspec.field(default=False, name="x-kubernetes-int-or-string")
    keeps_unknown: bool = msgspec.field(default=False, name="x-kubernetes-preserve-unknown-fields")
    list_type: str = msgspec.field(default="", name="x-kubernetes-list-type")
    list_map_keys: tuple[str, ...] = msgspec.field(default=(), name="x-kubernetes-list-map-keys")
    rules: tuple[Rule, ...] = msgspec.field(default=(), name="x-kubernetes-validations")


class UnfitTypeError(TypeError):
    """A type that has no structural schema."""


def structural(kind: type) -> Schema:
    """Return the schema of a type; raise UnfitTypeError."""
    return _schema(inspect.type_info(kind))


def without_nulls(schema: Schema) -> Schema:
    """Return the schema without `nullable`, for which the API server drops nulls before it checks rules and stores."""
    return replace(
        schema,
        nullable=False,
        properties={name: without_nulls(field) for name, field in schema.properties.items()},
        items=without_nulls(schema.items) if schema.items is not None else None,
    )


def description_of(kind: type) -> str:
    """Return the first paragraph of a type's docstring."""
    return (python.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def _schema(found: inspect.Type) -> Schema:
    schema: Schema
    match found:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            schema = _with_extra(_schema(inner), extra or {})
        case inspect.UnionType(types=types):
            schema = _of_union(types)
        case inspect.StructType():
            schema = _of_struct(found)
        case inspect.VarTupleType(item_type=item):
            schema = Schema(type="array", items=_schema(item))
        case inspect.DictType(key_type=inspect.StrType(), value_type=value):
            schema = Schema(type="object", additional_properties=_schema(value))
        case inspect.EnumType(cls=cls):
            schema = Schema(type="string", enum=tuple(str(member.value) for member in cls))
        case inspect.StrType(pattern=pattern):
            schema = Schema(type="string", pattern=pattern or "")
        case inspect.IntType() | inspect.BoolType():
            schema = Schema(type="integer" if isinstance(found, inspect.IntType) else "boolean")
        case _:
            raise UnfitTypeError(f"{found} has no structural schema")
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
    if {type(member) for member in types} == {inspect.StrType, inspect.IntType}:
        return Schema(int_or_string=True)
    return replace(_schema(_only(types)), nullable=True)


def _with_extra(schema: Schema, extra: Mapping[str, object]) -> Schema:
    """Return a schema with the description, pattern and enum of a field's `extra_json_schema`."""
    enum = extra.get("enum", schema.enum)
    return replace(
        schema,
        description=str(extra.get("description", schema.description)),
        pattern=str(extra.get("pattern", schema.pattern)),
        enum=tuple(str(value) for value in enum) if isinstance(enum, list | tuple) else (),
    )


def _only(types: Sequence[inspect.Type]) -> inspect.Type:
    """Return the type of a nullable value."""
    others = [member for member in types if not isinstance(member, inspect.NoneType)]
    if len(others) != 1 or len(others) == len(types):
        raise UnfitTypeError(f"expected one type or null, found {types}")
    return others[0]
