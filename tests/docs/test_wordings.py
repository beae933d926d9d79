"""Every reason has its text in the catalogue, renders, and uses the words of the glossary."""

import ast
import inspect
import re
from pathlib import Path
from typing import Protocol, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.model.reasons import (
    Reason,
    admission,
    clusterproblems,
    hypervisorproblems,
    kubevirtproblems,
    nativerefusals,
    nodeproblems,
    notoffered,
    ondemand,
    refusals,
    schedules,
    sharing,
    shortfalls,
    unhealthy,
    withheldshares,
)

SOURCES = Path(__file__).parent.parent.parent / "src/gpuvirt"
CATALOGUE = SOURCES / "model/reasons"
MODULES = (
    admission,
    clusterproblems,
    hypervisorproblems,
    kubevirtproblems,
    nativerefusals,
    nodeproblems,
    notoffered,
    ondemand,
    refusals,
    schedules,
    sharing,
    shortfalls,
    unhealthy,
    withheldshares,
)
WORDINGS = [
    wording
    for module in MODULES
    for _, wording in inspect.getmembers(module, inspect.isfunction)
    if wording.__module__ == module.__name__ and wording.__annotations__["return"] is Reason
]


class Wording(Protocol):
    """A function of the catalogue."""

    def __call__(self, **fields: object) -> Reason:
        """Return the reason."""
        ...


FROM_TEXT = {
    "model/doctor/vms/podfindings.py": "the kubelet's message",
    "model/offers/withholding.py": "the controller's spec",
}
"""Modules that decode a reason of another process."""
PRIVATE_WORDS = re.compile(
    r"\b(machines?|wish\w*(?!\.json)|carv\w+|(un)?heard|as a rule|in good order|somebody|whoever|anew|lets? go)\b"
)


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: f"{wording.__module__}.{wording.__name__}")
@settings(max_examples=5)
@given(data=st.data())
def test_every_reason_renders(wording: Wording, data: st.DataObject) -> None:
    texts = {name: st.text(min_size=1) for name, hint in get_type_hints(wording).items() if hint is str}
    reason = data.draw(st.builds(wording, **texts))
    assert reason.text.startswith(f"{reason.code}: {reason.subject} {reason.message}")
    assert all(place.text in reason.text for place in reason.places)
    assert reason.fix is None or reason.text.endswith(f"fix: {reason.fix}")
    assert reason.message


def test_reasons_are_created_only_in_the_catalogue() -> None:
    for path in SOURCES.rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        words = any(isinstance(called, ast.Name) and called.id == "Reason" for called in calls)
        expected = path.parent == CATALOGUE or str(path.relative_to(SOURCES)) in FROM_TEXT
        assert expected or not words, f"{path} words a reason itself"


@pytest.mark.parametrize("path", sorted(CATALOGUE.glob("*.py")), ids=lambda path: path.stem)
def test_reasons_have_no_private_words(path: Path) -> None:
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert [text for text in texts if isinstance(text, str) and PRIVATE_WORDS.search(text)] == []
