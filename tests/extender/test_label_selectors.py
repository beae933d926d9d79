"""Label selectors match as those of Kubernetes do."""

from collections.abc import Mapping, Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt import nulls
from gpuvirt.kube.labels import LabelSelector

KEYS, VALUES = "abc", "xyz"
LABELS = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES))
EXPRESSIONS = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
        st.lists(st.sampled_from(VALUES), min_size=1, max_size=2),
    ),
    max_size=3,
)


def selector(text: str) -> LabelSelector:
    return nulls.decode(text.encode(), LabelSelector)


def oracle(labels: Mapping[str, str], equal: Mapping[str, str], some: Sequence[tuple[str, str, list[str]]]) -> bool:
    """Decide by sets: a label that is absent has the value None."""
    allowed = {key: {None, *VALUES} for key in KEYS}
    for key, value in equal.items():
        allowed[key] &= {value}
    for key, operator, values in some:
        named: set[str | None] = set(values)
        allowed[key] &= {
            "In": named,
            "NotIn": {None, *VALUES} - named,
            "Exists": set(VALUES),
            "DoesNotExist": {None},
        }[operator]
    return all(labels.get(key) in allowed[key] for key in KEYS)


@given(LABELS, LABELS, EXPRESSIONS)
def test_a_selector_matches_where_all_its_requirements_hold(
    labels: Mapping[str, str], equal: Mapping[str, str], some: Sequence[tuple[str, str, list[str]]]
) -> None:
    expressions = [
        {"key": key, "operator": operator, "values": values if operator.endswith("In") else None}
        for key, operator, values in some
    ]
    content = msgspec.json.encode({"matchLabels": equal or None, "matchExpressions": expressions or None})
    assert selector(content.decode()).matches(labels) == oracle(labels, equal, some)


def test_a_selector_without_requirements_matches_all() -> None:
    for text in ("{}", '{"matchLabels": null, "matchExpressions": null}', '{"matchLabels": {}}'):
        assert selector(text).matches({})
        assert selector(text).matches({"a": "x"})


def test_an_operator_that_is_not_known_matches_nothing() -> None:
    unknown = selector('{"matchExpressions": [{"key": "a", "operator": "Like", "values": ["x"]}]}')
    assert not unknown.matches({"a": "x"})
    assert not unknown.matches({})
