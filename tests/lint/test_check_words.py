"""`make lint` finds words that must not return, loop variables that name nothing, and docstrings without a noun."""

from pathlib import Path

import pytest

from tests.lint.checkers import faults


@pytest.mark.parametrize(
    "line",
    [
        "for one in gpus: use(one)",
        "found = [one for one in gpus]",
        "found = {key: value for key, (one, value) in gpus}",
        "found = any(one for gpu in gpus for one in gpu)",
        "found = sorted(gpus, key=lambda one: one.name)",
        "async def f():\n    async for one in gpus: pass",
    ],
)
def test_a_loop_variable_that_names_nothing_is_a_fault(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(f"{line}\n")
    fault, count = faults("check_words", str(tmp_path / "new.py"))
    assert ": one: say a noun of the field" in fault
    assert count.startswith("1 words")


@pytest.mark.parametrize("line", ["one, other = gpus", "found = [gpu for gpu in gpus]", "open_one = len"])
def test_a_pair_of_values_is_no_fault(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(f"{line}\n")
    assert faults("check_words", str(tmp_path / "new.py")) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""What a node has."""',
        'class Node:\n    """Which GPUs a node has."""',
        'class Node:\n    gpus: int\n    """That of the GPUs."""',
        'def gpus():\n    """\n    Whose GPUs.\n    """',
    ],
)
def test_a_docstring_that_begins_with_a_clause_without_a_noun_is_a_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / "new.py").write_text(f"{text}\n")
    fault, _ = faults("check_words", str(tmp_path / "new.py"))
    assert "say the noun" in fault


@pytest.mark.parametrize("text", ['"""Whether it runs."""', 'found = "What a node has."', '"""Whatever it is."""'])
def test_other_texts_may_begin_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "new.py").write_text(f"{text}\n")
    assert faults("check_words", str(tmp_path / "new.py")) == []


def test_a_word_of_the_list_is_a_fault_in_names_and_texts(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('wished_vgpus = "a vGPU that is carved"\n')  # words that the list replaces
    found = faults("check_words", str(tmp_path / "new.py"))[:-1]
    assert [fault.split(": ")[1] for fault in found] == ["carved", "wished_vgpus"]
