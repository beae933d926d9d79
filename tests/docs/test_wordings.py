"""Every reason has one text, renders, and uses the words of the glossary."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.model import reasons
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.model.reasons.schedules import HYPERVISOR_WORDS

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "src/gpuvirt"
CATALOGUE = SOURCES / "model/reasons"
WORDING = tuple(
    path
    for folder in (SOURCES, ROOT / "schedules/src")
    for path in sorted(folder.rglob("*.py"))
    if path.parent == CATALOGUE or "Reason(" in path.read_text()
)
"""The modules that word reasons: the catalogue, and those that word a reason where they find its cause."""
MODULES = tuple(
    importlib.import_module(f"{reasons.__name__}.{path.stem}")
    for path in sorted(CATALOGUE.glob("*.py"))
    if path.stem != "__init__"
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
    SOURCES / "diagnosis/vms/vmfindings.py": "the kubelet's message",
    SOURCES / "model/offers/namereview.py": "the controller's spec",
}
"""Modules that decode a reason of another process."""
PRIVATE_WORDS = re.compile(
    r"\b(machines?|wish\w*(?!\.json)|carv\w+|(un)?heard|as a rule|in good order|somebody|whoever|anew|lets? go)\b"
)


SHOWN_AS_IS = st.characters(categories=("L", "N", "P", "S"), exclude_characters="'\"\\")
"""Characters that are the same in quotes."""


def recognizable(field: str, hint: object) -> st.SearchStrategy[str] | None:
    """Return texts for a field that no wording contains by itself; None for a field that is no text."""
    if str not in {hint, getattr(hint, "__supertype__", None)}:
        return None
    if field == "code":  # another component's, which a reason has only if the catalogue has it
        return st.sampled_from([str(code) for code in ReasonCode])
    return st.text(SHOWN_AS_IS, min_size=1).map(lambda text: f"<{field} {text}>")


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: f"{wording.__module__}.{wording.__name__}")
@settings(max_examples=5)
@given(data=st.data())
def test_the_text_of_a_reason_has_all_that_it_was_made_of(wording: Wording, data: st.DataObject) -> None:
    hints = get_type_hints(wording)
    strategies = {name: recognizable(name, hint) for name, hint in hints.items()}
    texts: dict[str, object] = {name: data.draw(each) for name, each in strategies.items() if each is not None}
    if hints.get("code") is ReasonCode:
        texts["code"] = data.draw(st.sampled_from(list(HYPERVISOR_WORDS)))
    reason = data.draw(st.builds(wording, **{name: st.just(text) for name, text in texts.items()}))
    assert reason.message
    assert {name: text for name, text in texts.items() if str(text) not in reason.text} == {}


def test_the_text_of_a_reason_is_one_line_with_its_code_subject_places_and_fix() -> None:
    reason = refusals.agent_silent("0000:3b:00.0", "/plugins/gpu.sock", "nvidia.com/A10")
    assert reason.text == (
        "AgentSilent: 0000:3b:00.0 is offered by a device plugin that commands can't ask to withdraw it: the plugin has"
        " no gates; seen: /plugins/gpu.sock: nvidia.com/A10; fix: stop the plugin, or upgrade it and let its pod create"
        " folders in the kubelet's device-plugins folder"
    )


def test_a_reason_that_is_worded_outside_of_the_catalogue_names_its_code() -> None:
    for path in WORDING:
        if path.parent != CATALOGUE and path not in FROM_TEXT:
            for call in _reasons(ast.parse(path.read_text())):
                assert _codes_in(call.args[0]), f"{path}:{call.lineno} words a reason of any code"


@pytest.mark.parametrize("path", WORDING, ids=lambda path: path.stem)
def test_reasons_have_no_private_words(path: Path) -> None:
    tree = ast.parse(path.read_text())
    wordings = [tree] if path.parent == CATALOGUE else _reasons(tree)
    texts = [node.value for wording in wordings for node in ast.walk(wording) if isinstance(node, ast.Constant)]
    assert [text for text in texts if isinstance(text, str) and PRIVATE_WORDS.search(text)] == []


OF_SCHEDULES = {
    "BACK_END_MISSING",
    "CALL_REFUSED",
    "CREDENTIALS_INCOMPLETE",
    "HYPERVISOR_FORBIDDEN",
    "NOT_ONE_VGPU",
    "RIGHT_MISSING",
    "STEP_PENDING",
    "VGPU_CONFIG_PENDING",
    "VM_NOT_MATCHED",
}
WORDED_TWICE = {*OF_SCHEDULES, "INJECTED_NAME_TAKEN"}
"""Codes that several functions word, each for other facts. No further code gets a second one."""


def test_a_code_is_worded_by_one_function() -> None:
    """Its fix follows from the facts there, so that equal facts have equal fixes in every command, object and log."""
    worded: dict[str, set[str]] = {}
    for path in WORDING:
        for function in _functions(ast.parse(path.read_text())) if path not in FROM_TEXT else ():
            for code in _codes(function) if path.parent == CATALOGUE else _worded(function):
                worded.setdefault(code, set()).add(f"{path}:{function.lineno}")
    several = {code: functions for code, functions in worded.items() if len(functions) > 1}
    assert several.keys() == WORDED_TWICE, several


def _functions(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the functions, methods and tables of a module."""
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return (node for block in blocks for node in block if not isinstance(node, ast.ClassDef))


def _reasons(tree: ast.AST) -> list[ast.Call]:
    """Return the calls that create a reason."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) == "Reason"]


def _worded(function: ast.AST) -> set[str]:
    """Return the codes of the reasons that a function outside of the catalogue creates."""
    return {code for call in _reasons(function) for code in _codes_in(call.args[0])}


def _codes_in(code: ast.expr) -> set[str]:
    """Return the members of ReasonCode in the first argument of a reason: one, or that of another program's code."""
    return {member.attr for node in ast.walk(code) if (member := _code(node)) is not None and member.attr.isupper()}


def _codes(function: ast.stmt) -> set[str]:
    """Return the codes that a function gives to reasons, but not those that it looks up or cuts from a text."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    cut = {arg for call in calls if _name(call) in {"without_code", "str"} for arg in call.args}
    named = (code for node in ast.walk(function) if node not in cut and (code := _code(node)) is not None)
    return {code.attr for code in named if code.attr.isupper()}


def _name(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


FINDINGS = {"problem", "Finding"}


def test_findings_take_the_words_of_a_reason_from_the_catalogue() -> None:
    """A code that a device can have is worded once, so that no command contradicts another."""
    for path in (SOURCES / "diagnosis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FINDINGS:
                codes = {part.attr for part in map(_code, node.args) if part is not None}
                assert not codes, f"{path}:{node.lineno} words a reason itself: use of_reason"


def _code(node: ast.AST) -> ast.Attribute | None:
    """Return the member of ReasonCode that an expression is, None for another node."""
    is_member = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ReasonCode"
    return node if is_member and isinstance(node, ast.Attribute) else None
