"""Orders and answers survive the way over a pipe; a server is a host and a port; each problem has its reason."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.model.workers.hypervisor import Abilities, Ability, VmKey
from gpuvirt_schedules.hypervisors.connection import CODES, reason, worded
from gpuvirt_schedules.hypervisors.messages import (
    ANSWERS,
    ORDERS,
    Answer,
    BackEndError,
    Checked,
    CheckVms,
    Failed,
    Made,
    Make,
    Order,
    Problem,
    Read,
    Renew,
    Start,
    Vms,
    line,
)
from gpuvirt_schedules.hypervisors.vsphere.session import FAULTS, place, problem_of

TIMES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
ORDER = st.from_type(Start) | st.builds(Renew, TIMES) | st.from_type(Read) | st.from_type(Make) | st.from_type(CheckVms)
ANSWER = st.from_type(Vms) | st.from_type(Made) | st.from_type(Checked) | st.from_type(Failed)


@given(ORDER)
def test_an_order_is_one_line_and_is_read_back(order: Order) -> None:
    text = line(order)
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    assert ORDERS.decode(text) == order


@given(ANSWER)
def test_an_answer_is_one_line_and_is_read_back(answer: Answer) -> None:
    text = line(answer)
    assert text.count(b"\n") == 1
    assert ANSWERS.decode(text) == answer


def test_an_order_to_start_shows_no_credentials() -> None:
    shown = repr(Start("vsphere", "vcenter", "PEM", "user", "secret"))
    assert shown == "Start(kind='vsphere', server='vcenter')"


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("vcenter.example", ("vcenter.example", 443)),
        ("vcenter.example:8989", ("vcenter.example", 8989)),
        ("10.0.0.1", ("10.0.0.1", 443)),
        ("[fd00::1]:8989", ("fd00::1", 8989)),
        ("https://vcenter.example/sdk", ("vcenter.example", 443)),
    ],
)
def test_a_server_is_a_host_and_a_port(server: str, expected: tuple[str, int]) -> None:
    assert place(server) == expected


@given(st.text())
def test_any_text_is_a_server_or_refused(server: str) -> None:
    with suppress(BackEndError):
        host, port = place(server)
        assert host
        assert 0 <= port < 65536


@pytest.mark.parametrize("server", ["http://vcenter", "ftp://vcenter", "", "vcenter:99999", "vcenter:port"])
def test_a_server_without_tls_or_name_is_refused(server: str) -> None:
    with pytest.raises(BackEndError):
        place(server)


@pytest.mark.parametrize("problem", Problem)
def test_each_problem_has_a_code_of_its_own(problem: Problem) -> None:
    found = reason(problem, "vcenter", "words")
    assert found.fix
    assert "vcenter" in found.text
    assert [reason(other, "vcenter", "").code for other in CODES].count(found.code) == 1


@pytest.mark.parametrize(("fault", "problem", "is_certain"), FAULTS)
def test_faults_are_told_apart(fault: type[Exception], problem: Problem, *, is_certain: bool) -> None:
    found = problem_of(fault(), is_certain=False)
    assert (found.problem, found.is_certain) == (problem, is_certain)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), TimeoutError("timed out"), ValueError("what")])
def test_what_is_no_fault_leaves_a_call_unknown(error: Exception) -> None:
    assert not problem_of(error, is_certain=False).is_certain


def test_abilities_are_worded() -> None:
    possible = Ability(True)
    found = worded(
        Abilities(VmKey("1"), Ability(False, Problem.NO_SUSPEND, "words"), possible, possible, possible), "vcenter"
    )
    assert found.suspend.code == "SuspendNotSupported"
    assert "words" in found.suspend.text
    assert found.start == possible
