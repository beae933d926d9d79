"""Documents that people write: read as they mean them, or refused with file, line, path and what was expected."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt import documents
from gpuvirt.errors import ConfigError, DamagedError


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}
    maybe: Inner | None = None


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
def test_what_people_write_is_what_is_read(text: str, name: str) -> None:
    assert documents.parse(text, Outer, where="f").name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 1", "f:1: $.name: Expected `str`, got `int`"),
        ("nam: x", "f:1: $.nam: no such key; expected one of: name, inner, many, named, maybe"),
        ("inner: {numbr: 1}", "f:1: $.inner.numbr: no such key; expected one of: number"),
        ("many:\n- number: 1\n- number: x\n", "f:3: $.many[1].number: Expected `int`, got `str`"),
        ("many:\n- number: 1\n- nr: 1\n", "f:3: $.many[1].nr: no such key; expected one of: number"),
        ("named:\n  a: {number: x}\n", "f:2: $.named[...].number: Expected `int`, got `str`"),
        ("maybe:\n  x: 1\n", "f:2: $.maybe.x: no such key; expected one of: number"),
        ("name: a\nname: b\n", "f:2: $.name: this key stands twice"),
        ("inner:\n  number: 1\n  number: 2\n", "f:3: $.inner.number: this key stands twice"),
        ("- 1", "f:1: $: Expected `object`, got `array`"),
        ("many: &a [*a]", "f:1: $.many[0]: this alias stands inside what it refers to"),
        ("name: [", "f:2: $: not YAML: did not find expected node content"),
        ("name: !!python/object:os.system x", "f:1: $: not YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "f:2: $: not YAML: but found another document"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        documents.parse(text, Outer, where="f")
    assert str(error.value).startswith(message)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        documents.parse(text, Outer, where="f")
    except ConfigError:
        return


@given(st.binary())
def test_any_bytes_are_json_or_refused(content: bytes) -> None:
    try:
        documents.from_json(content, Outer)
    except DamagedError:
        return


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        documents.load(tmp_path / "none", Outer)
    (tmp_path / "bytes").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text: invalid start byte at byte 6"):
        documents.load(tmp_path / "bytes", Outer)
