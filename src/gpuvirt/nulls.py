"""Reads documents of Go programs, in which null stands for an absent field. msgspec has no option for that.

Go encodes nil slices, maps and pointers as null: `"conditions": null`. The decoders of Kubernetes treat null as absent,
and so does this module. A field whose type allows null keeps it. A required field that is null is an error.
"""

from functools import cache
from typing import TypeVar

import msgspec
from msgspec import inspect

from gpuvirt.plain import Plain

T = TypeVar("T")


def decode(content: bytes | msgspec.Raw, shape: type[T]) -> T:
    """Return JSON as a `shape`; raise msgspec.DecodeError and UnicodeDecodeError.

    Nulls are removed only where the document does not match as it is, so that large lists cost nothing more.
    """
    try:
        return msgspec.json.decode(content, type=shape)
    except msgspec.ValidationError:
        if b"null" not in bytes(content):
            raise
    plain: Plain = msgspec.json.decode(content)
    return msgspec.json.decode(msgspec.json.encode(removed(plain, shape)), type=shape)


def is_null(content: msgspec.Raw) -> bool:
    """Return whether an undecoded field is null."""
    return bytes(content) == b"null"


def removed(content: Plain, shape: object) -> Plain:
    """Return a document without the nulls that stand for absent fields of a `shape`; `content` stays unchanged."""
    return _removed(content, _type_of(shape))


@cache
def _type_of(shape: object) -> inspect.Type:
    return inspect.type_info(shape)


def _removed(content: Plain, of: inspect.Type) -> Plain:
    match of:
        case inspect.Metadata():
            return _removed(content, of.type)
        case inspect.UnionType():
            for alternative in of.types:
                content = _removed(content, alternative)
        case inspect.StructType() if isinstance(content, dict):
            fields = {field.encode_name: field for field in of.fields}
            droppable = {name for name, field in fields.items() if not field.required and not _takes_null(field.type)}
            return {
                key: _removed(value, fields[key].type) if key in fields else value
                for key, value in content.items()
                if value is not None or key not in droppable
            }
        case inspect.DictType() if isinstance(content, dict):
            keeps = _takes_null(of.value_type)
            return {key: _removed(value, of.value_type) for key, value in content.items() if keeps or value is not None}
        case inspect.ListType() | inspect.VarTupleType() if isinstance(content, list):
            return [_removed(item, of.item_type) for item in content]
        case _:
            pass
    return content


def _takes_null(of: inspect.Type) -> bool:
    match of:
        case inspect.Metadata():
            return _takes_null(of.type)
        case inspect.UnionType():
            return any(_takes_null(alternative) for alternative in of.types)
        case inspect.AnyType() | inspect.NoneType() | inspect.RawType() | inspect.CustomType():
            return True
        case _:
            return False
