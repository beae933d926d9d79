"""Documents of users: parsed, or refused with file, line, path and the expected value."""

from enum import StrEnum
from pathlib import Path

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
    maybe: Inner | None = None
    colour: Colour | None = None
    colours: tuple[Colour, ...] = ()
    deep: dict[str, tuple[dict[str, Inner], ...]] = {}


BOMB = "b: &a0 [x]\n" + "".join(
    f"b{number}: &a{number + 1} [{', '.join([f'*a{number}'] * 10)}]\n" for number in range(40)
)
"""Each line has ten times as many values as the line before."""
LADDER = "".join(
    f"b{number}: &a{number} {'[' * 30}{f'*a{number - 1}' if number else ''}{']' * 30}\n" for number in range(200)
)
"""Each line adds thirty levels."""


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
        ("nam: x", "f:1: $.nam: no such key; expected one of: name, inner, many, named, maybe, colour, colours, deep"),
        ("inner: {numbr: 1}", "f:1: $.inner.numbr: no such key; expected one of: number"),
        ("many:\n- number: 1\n- number: x\n", 'f:3: $.many[1].number: expected a whole number, found text "x"'),
        ("many:\n- number: 1\n- nr: 1\n", "f:3: $.many[1].nr: no such key; expected one of: number"),
        ("named:\n  a: {number: x}\n", 'f:2: $.named.a.number: expected a whole number, found text "x"'),
        (
            "named:\n  a: {}\n  a.b:\n    number: x\nname: 1\n",
            'f:4: $.named.a.b.number: expected a whole number, found text "x"',
        ),
        ("named: {}\nname: 1\nmany: [1]\n", "f:2: $.name: expected text, found 1"),
        ("deep:\n  a: [{}]\n  b: [{}, {c: 1}, {c: {number: x}}]\n", "f:3: $.deep.b[1].c: expected a mapping, found 1"),
        (
            "deep:\n  a: []\n  b:\n  - c: {}\n    d: {nr: 1}\n",
            "f:5: $.deep.b[0].d.nr: no such key; expected one of: number",
        ),
        ("maybe:\n  x: 1\n", "f:2: $.maybe.x: no such key; expected one of: number"),
        ("name: a\nname: b\n", "f:2: $.name: duplicate key"),
        ("inner:\n  number: 1\n  number: 2\n", "f:3: $.inner.number: duplicate key"),
        ("- 1", "f:1: $: expected a mapping, found a list"),
        ("many: &a [*a]", "f:1: $.many[0]: an alias refers to a value that contains the alias"),
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
        (BOMB, "f:6: $.b4: with its aliases expanded, this has more than 100,000 values; remove some"),
        (LADDER, "f:2: $.b1"),
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


def test_an_alias_has_the_value_of_its_anchor() -> None:
    read = documents.parse("inner: &one {number: 1}\nmany: [*one, *one]\nmaybe: *one\n", Outer, where="f")
    assert (read.many, read.maybe) == ((Inner(1), Inner(1)), Inner(1))


def test_a_fault_found_after_parsing_is_reported_with_its_line_and_path() -> None:
    written = documents.parse_written("named:\n  a.b:\n    number: 1\n", Outer, where="f")
    assert written.value.named == {"a.b": Inner(1)}
    assert str(written.fault("is odd", ["named", "a.b", "number"])) == "f:3: $.named.a.b.number: is odd"
    assert str(written.fault("is odd", ["named", "c"])) == "f:1: $.named.c: is odd"


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


@given(st.binary())
def test_arbitrary_bytes_are_json_or_refused(content: bytes) -> None:
    try:
        documents.from_json(content, Outer)
    except DamagedError:
        return


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        documents.load(tmp_path / "none", Outer)
    (tmp_path / "bytes").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text: invalid start byte at byte 6"):
        documents.load(tmp_path / "bytes", Outer)
