"""Names of vGPU types: parsed, written, and matched with the names of hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import VgpuType
from gpuvirt.model.vgputypes import profiles
from gpuvirt.model.vgputypes.profiles import Profile, Series, Suffix, parse_profile, profile_name

TIME_SLICED_CARDS = st.from_regex(r"[A-Z0-9]{1,8}(-[A-Za-z]{1,5}){0,2}", fullmatch=True)
MIG_CARDS = st.from_regex(r"[A-Z0-9]{1,8}", fullmatch=True)
SIZES = st.integers(0, 9999)

PROFILES = st.one_of(
    st.builds(Profile, TIME_SLICED_CARDS, st.none(), SIZES, st.sampled_from(Series)),
    st.builds(
        Profile, MIG_CARDS, st.integers(1, 9), SIZES, st.sampled_from(Series), st.none() | st.sampled_from(Suffix)
    ),
)


@given(PROFILES)
def test_a_written_profile_is_parsed_back(profile: Profile) -> None:
    assert parse_profile(profile.text) == profile


@given(st.text(alphabet="A10-BCQ24MENOGFXaL _", max_size=14))
def test_any_text_parses_to_a_type_of_the_same_name_or_is_refused(text: str) -> None:
    try:
        profile = parse_profile(text)
    except InvalidIdError:
        return
    assert profile.text == text
    assert "--" not in text
    assert " " not in text


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ("A10-4Q", Profile("A10", None, 4, Series.Q)),
        ("RTX6000-Ada-2Q", Profile("RTX6000-Ada", None, 2, Series.Q)),
        ("A100-1-5CME", Profile("A100", 1, 5, Series.C, Suffix.ME)),
        ("DC-1-24QGFX", Profile("DC", 1, 24, Series.Q, Suffix.GFX)),
        ("DC-4-24QNOME", Profile("DC", 4, 24, Series.Q, Suffix.NOME)),
        ("A100-1-5CMEALL", Profile("A100", 1, 5, Series.C, Suffix.MEALL)),
        ("M60-0B", Profile("M60", None, 0, Series.B)),
        ("6000D-84C", Profile("6000D", None, 84, Series.C)),
    ],
)
def test_parts_of_a_type_name(text: str, profile: Profile) -> None:
    assert parse_profile(text) == profile


NO_TYPES = "A10 A10-4 A10-4q a10-4Q A10-04Q A10-4QME A10-4D RTX6000-Ada-1-2Q A100-0-5C A100-10-5C T4-2B4 A10--4Q -4Q"


@pytest.mark.parametrize(
    "text", [*NO_TYPES.split(), "A\u06610-4Q", "", " A10-4Q", "A10-4Q ", "A10-4Q\n", "NVIDIA A10-4Q"]
)
def test_text_that_is_no_vgpu_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidIdError, match="is not a vGPU type: expected CARD-GBs"):
        parse_profile(text)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("GRID T4-1Q", "T4-1Q"),
        ("NVIDIA A10-12Q", "A10-12Q"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-48C", "DC-48C"),
        ("NVIDIA A10-12Q\n", "A10-12Q"),
        ("A10-12Q", "A10-12Q"),
        ("", ""),
    ],
)
def test_config_name_of_a_type_name_of_the_host(host: str, name: str) -> None:
    assert profile_name(host) == name


def test_framebuffer_of_a_type() -> None:
    assert [parse_profile(name).framebuffer_mib for name in ("M60-0B", "A10-1Q", "DC-1-24Q")] == [512, 1024, 24576]


A100 = [VgpuType(f"NVIDIA A100-1-{size}") for size in ("5C", "5CME", "10C")]
BLACKWELL = [VgpuType(f"NVIDIA RTX Pro 6000 Blackwell DC-{size}") for size in ("24Q", "1-24Q")]


@pytest.mark.parametrize(
    ("profile", "known", "meant"),
    [
        ("DC-1-24QGFX", BLACKWELL, "NVIDIA RTX Pro 6000 Blackwell DC-1-24Q"),
        ("DC-1-24Q", BLACKWELL, "NVIDIA RTX Pro 6000 Blackwell DC-1-24Q"),
        ("A100-1-5CME", A100, "NVIDIA A100-1-5CME"),
        ("A100-1-5C", A100, "NVIDIA A100-1-5C"),
        ("A100-1-5CNOME", A100, "NVIDIA A100-1-5C"),
        ("A100-1-5C", A100[1:], None),
        ("A100-1-10CMEALL", A100, "NVIDIA A100-1-10C"),
        ("A100-2-10C", A100, None),
        ("A10-4Q", [], None),
    ],
)
def test_the_type_of_the_host_that_a_profile_selects(profile: str, known: list[VgpuType], meant: str | None) -> None:
    assert profiles.host_type(parse_profile(profile), known) == meant


def test_card_names_come_from_type_names() -> None:
    types = [VgpuType(name) for name in ("GRID T4-2B4", "NVIDIA A16-1B", "NVIDIA RTX6000-Ada-2Q", "i915-GVTg_V5_4")]
    assert profiles.card_names(types) == {"A16", "RTX6000-Ada"}
