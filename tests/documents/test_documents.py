"""Documents of users: parsed, or refused with file, line, path and the expected value."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt import documents
from gpuvirt.errors import ConfigError, DamagedError


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}
    limited: dict[str, Annotated[int, msgspec.Meta(ge=1)]] = {}
    painted: dict[str, Colour] = {}
    maybe: Inner | None = None
    colour: Colour | None = None
    colours: tuple[Colour, ...] = ()
    deep: dict[str, tuple[dict[str, Inner], ...]] = {}


ALIAS = "$: an alias (`*NAME`) is not supported; write the value in its place"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("name: 0000:04:00.0", "0000:04:00.0"),
        ("name: on", "on"),
        ("name: no", "no"),
        ("name: 0x", "0x"),
        ("name: 030200", "030200"),
        ("name: '1'", "1"),
        ("name: 2026-01-01", "2026-01-01"),
        ("{}", ""),
        ("", ""),
        ("# nothing\n", ""),
        ("---\nname: x\n", "x"),
    ],
)
def test_a_yaml_scalar_is_read_as_text(text: str, name: str) -> None:
    assert documents.parse(text, Outer, where="f").name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 1", "f:1: $.name: expected text, found 1"),
        ("nam: x", "f:1: $.nam: no such key; expected one of: name, inner, many, named, limited, painted, maybe,"),
        ("inner: {numbr: 1}", "f:1: $.inner.numbr: no such key; expected one of: number"),
        ("many:\n- number: 1\n- number: x\n", 'f:3: $.many[1].number: expected a whole number, found text "x"'),
        ("many:\n- number: 1\n- nr: 1\n", "f:3: $.many[1].nr: no such key; expected one of: number"),
        ("named:\n  a: {number: x}\n", "f:1: $.named[...].number: expected a whole number, found text"),
        ("name: x\nnamed:\n  a: {}\n  b: {nr: 1}\n", "f:2: $.named[...].nr: no such key; expected one of: number"),
        ("named: {a: null}", "f:1: $.named[...]: expected a mapping, found nothing"),
        ("limited:\n  a: 0", "f:1: $.limited[...]: expected a whole number >= 1"),
        ("painted:\n  a: gren", 'f:1: $.painted[...]: expected one of: red, green; found text "gren"; did you mean'),
        ("named: {}\nname: 1\nmany: [1]\n", "f:2: $.name: expected text, found 1"),
        (
            "deep:\n  a: [{}]\n  b: [{}, {c: 1}, {c: {number: x}}]\n",
            "f:1: $.deep[...][1][...]: expected a mapping, found a whole number",
        ),
        ("maybe:\n  x: 1\n", "f:2: $.maybe.x: no such key; expected one of: number"),
        ("name: a\nname: b\n", "f:2: $.name: duplicate key"),
        ("inner:\n  number: 1\n  number: 2\n", "f:3: $.inner.number: duplicate key"),
        ("- 1", "f:1: $: expected a mapping, found a list"),
        ("inner: &a {number: 1}\nmaybe: *a\n", f"f:2: {ALIAS}"),
        ("many: &a [*a]", f"f:1: {ALIAS}"),
        ("named:\n  a: &a {number: 1}\n  b:\n    <<: *a\n", f"f:4: {ALIAS}"),
        ("name: [", "f:2: $: not YAML: did not find expected node content"),
        (
            "name: !!python/object:os.system x",
            "f:1: $.name: the tag !!python/object:os.system is not supported; remove",
        ),
        ("many: !!set {a}", "f:1: $.many: the tag !!set is not supported; remove it"),
        ("name: !!timestamp foo", "f:1: $.name: the tag !!timestamp is not supported; remove it"),
        (
            "inner:\n  number: !!int abc",
            "f:2: $.inner.number: the tag !!int requires a whole number, found 'abc'",
        ),
        ("name: !!bool foo", "f:1: $.name: the tag !!bool requires true or false, found 'foo'; correct"),
        ("name: !!null foo", "f:1: $.name: the tag !!null requires null, found 'foo'"),
        (
            "inner: {number: " + "1" * 5000 + "}",
            "f:1: $.inner.number: expected a whole number, found a number that is too large",
        ),
        (
            "named: {3182: x}",
            "f:1: $.named.3182: a key must be a string, found a whole number; put it in quotes: '3182'",
        ),
        (
            "named:\n  true: x",
            "f:2: $.named.true: a key must be a string, found true or false; put it in quotes: 'true'",
        ),
        ("named: {[a]: x}", "f:1: $.named: a key must be a string, found a list or a mapping"),
        ("colours:\n- red\n- gren", 'f:3: $.colours[1]: expected one of: red, green; found text "gren"'),
        ("colour: gren", 'f:1: $.colour: expected one of: red, green; found text "gren"; did you mean green?'),
        ("color: red", "f:1: $.color: no such key; expected one of: "),
        ("name:\n  " + "[" * 3000, "f:2: $: lists and mappings are nested too deep; expected at most 40 levels"),
        ("[" * 100_000, "f:1: $: lists and mappings are nested too deep; expected at most 40 levels"),
        ("- " * 3000, "f:1: $: lists and mappings are nested too deep; expected at most 40 levels"),
        ("many:\n" + "- 1\n" * 100_000, "f:99999: $: more than 100,000 keys and values; remove some"),
        ("a: 1\n---\nb: 2\n", "f:2: $: not YAML: but found another document"),
    ],
)
def test_an_invalid_document_is_reported_with_its_line_and_path(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        documents.parse(text, Outer, where="f")
    assert str(error.value).startswith(message)


def test_a_misspelled_key_is_recognized() -> None:
    with pytest.raises(ConfigError, match=r"no such key; expected one of: .*; did you mean colour\?$"):
        documents.parse("color: red", Outer, where="f")


@given(st.text())
def test_arbitrary_text_is_read_or_refused(text: str) -> None:
    try:
        documents.parse(text, Outer, where="f")
    except ConfigError:
        return


TAGS = ["", "!!str ", "!!int ", "!!bool ", "!!float ", "!!null ", "!!timestamp ", "!!set ", "!!seq ", "!!map ", "!own "]
SCALARS = ["x", "1", "''", "true", "~", "1e9", "2026-01-01", "0x1f", '"a b"', "<<", "1" * 5000]


def collections(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")
    mappings = st.lists(st.tuples(inner, inner), max_size=4).map(
        lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
    )
    return st.builds(
        str.__add__,
        st.builds(str.__add__, st.sampled_from(TAGS), st.sampled_from(["", "&a ", "&b "])),
        lists | mappings,
    )


VALUES = st.recursive(
    st.builds(str.__add__, st.sampled_from(TAGS), st.sampled_from(SCALARS)) | st.sampled_from(["*a ", "*b "]),
    collections,
    max_leaves=30,
)


@given(st.lists(st.tuples(st.sampled_from(["name", "inner", "many", "named", "maybe", "colours", "3", "<<"]), VALUES)))
def test_arbitrary_tags_nesting_and_aliases_are_read_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        documents.parse("".join(f"{key}: {value}\n" for key, value in pairs), Outer, where="f")
    except ConfigError as error:
        assert str(error).startswith("f:")  # noqa: PT017  most texts are refused, and some are not
        assert "\n" not in str(error)  # noqa: PT017


def test_an_anchor_without_an_alias_means_nothing() -> None:
    assert documents.parse("inner: &one {number: 1}\n", Outer, where="f").inner == Inner(1)


def test_a_fault_found_after_parsing_is_reported_with_its_line_and_path() -> None:
    written = documents.parse_written("named:\n  a.b:\n    number: 1\n", Outer, where="f")
    assert written.value.named == {"a.b": Inner(1)}
    assert str(written.fault("is odd", ["named", "a.b", "number"])) == "f:3: $.named.a.b.number: is odd"
    assert str(written.fault("is odd", ["named", "c"])) == "f:1: $.named.c: is odd"


class Parts(msgspec.Struct, frozen=True):
    named: dict[str, object] = {}
    """Each an `Inner`."""


def test_a_fault_in_a_value_that_is_read_by_itself_has_its_key_and_line() -> None:
    written = documents.parse_written("named:\n  a: {number: 1}\n  a.b:\n    number: x\n", Parts, where="f")
    first, second = written.value.named.items()
    assert written.part(first[1], ["named", first[0]], Inner) == Inner(1)
    with pytest.raises(ConfigError) as error:
        written.part(second[1], ["named", second[0]], Inner)
    assert str(error.value) == 'f:4: $.named.a.b.number: expected a whole number, found text "x"'


def test_an_error_about_a_long_text_is_short() -> None:
    with pytest.raises(ConfigError) as error:
        documents.parse(f"colour: {'x' * 10_000}", Outer, where="f")
    assert len(str(error.value)) < 500
    assert str(error.value).endswith('..."')


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_text("# nothing\n" * 200_000)
    with pytest.raises(ConfigError, match="is too large; expected at most 1 MiB"):
        documents.load(path, Outer)


JSON = b'{"name": "a", "inner": {"number": 1}, "named": {"b": {}}, "colours": ["red"], "maybe": null}'


@given(
    st.binary() | st.builds(lambda at, junk: JSON[:at] + junk + JSON[at:], st.integers(0, len(JSON)), st.binary()),
)
def test_arbitrary_bytes_are_json_or_refused(content: bytes) -> None:
    try:
        documents.from_json(content, Outer)
    except DamagedError:
        return


class Open(msgspec.Struct, frozen=True):
    """A shape that skips fields of newer versions."""


@pytest.mark.parametrize("content", [b"", b'{"a": ' + b"[" * 100_000], ids=["cut", "deep"])
def test_damaged_json_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedError, match="cannot be parsed"):
        documents.from_json(content, Open)


def test_json_whose_text_is_not_utf8_is_refused() -> None:
    with pytest.raises(DamagedError, match="can't decode byte 0xff"):
        documents.from_json(b'{"name": "\xff"}', Outer)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        documents.load(tmp_path / "none", Outer)
    (tmp_path / "bytes").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text: invalid start byte at byte 6"):
        documents.load(tmp_path / "bytes", Outer)
