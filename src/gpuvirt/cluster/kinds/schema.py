"""Structural schemas of our kinds, from the types that we decode them into: the two can't differ.

Source: Kubernetes' CustomResourceDefinitions, "Specifying a structural schema": no references, no union of types, and
`nullable` where a value may be null. Defaults are left out: a server would write them into objects that lack them.
"""

import inspect as python
from collections.abc import Sequence

import msgspec
from msgspec import inspect
from msgspec.structs import replace


class Rule(msgspec.Struct, frozen=True):
    """What an object must satisfy, in CEL, and what is said where it does not."""

    rule: str
    message: str


class Schema(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The fields of JSONSchemaProps (apiextensions.k8s.io/v1) that our kinds need."""

    description: str = ""
    type: str
    nullable: bool = False
    pattern: str = ""
    enum: tuple[str, ...] = ()
    properties: dict[str, "Schema"] = {}
    required: tuple[str, ...] = ()
    items: "Schema | None" = None
    max_items: int | None = None
    list_type: str = msgspec.field(default="", name="x-kubernetes-list-type")
    list_map_keys: tuple[str, ...] = msgspec.field(default=(), name="x-kubernetes-list-map-keys")
    rules: tuple[Rule, ...] = msgspec.field(default=(), name="x-kubernetes-validations")


class UnfitTypeError(TypeError):
    """A type that no structural schema describes."""


def structural(kind: type) -> Schema:
    """Return the schema of a type; raise UnfitTypeError."""
    return _schema(inspect.type_info(kind))


def description_of(kind: type) -> str:
    """Return what is said of a type: the first paragraph of its docstring."""
    return (python.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def _schema(found: inspect.Type) -> Schema:
    schema: Schema
    match found:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            schema = replace(_schema(inner), description=str((extra or {}).get("description", "")))
        case inspect.UnionType(types=types):
            schema = replace(_schema(_only(types)), nullable=True)
        case inspect.StructType(cls=cls, fields=fields):
            properties = {field.encode_name: _schema(field.type) for field in fields}
            required = tuple(field.encode_name for field in fields if field.required)
            schema = Schema(description=description_of(cls), type="object", properties=properties, required=required)
        case inspect.VarTupleType(item_type=item):
            schema = Schema(type="array", items=_schema(item))
        case inspect.EnumType(cls=cls):
            schema = Schema(type="string", enum=tuple(str(one.value) for one in cls))
        case inspect.StrType(pattern=pattern):
            schema = Schema(type="string", pattern=pattern or "")
        case inspect.IntType():
            schema = Schema(type="integer")
        case inspect.BoolType():
            schema = Schema(type="boolean")
        case _:
            raise UnfitTypeError(f"no structural schema describes {found}")
    return schema


def _only(types: Sequence[inspect.Type]) -> inspect.Type:
    """Return the one type that a value has where it is not null."""
    others = [one for one in types if not isinstance(one, inspect.NoneType)]
    if len(others) != 1 or len(others) == len(types):
        raise UnfitTypeError(f"a value is of one type, or null; found {types}")
    return others[0]
