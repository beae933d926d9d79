"""The controller's log lines: one for a change of state, of less than 500 characters, with each reason once."""

import logging

import pytest
from typing_extensions import override

from gpuvirt.controller.controller import log_invalid
from gpuvirt.controller.policy.policies import InvalidValue
from gpuvirt.controller.writer import MOST_LOGGED, Write, logged
from gpuvirt.controller.writes import PatchPolicyStatus
from gpuvirt_sim.clock import SimClock
from tests.controller.observedcluster import ObservedCluster, node, policy
from tests.controller.writeserver import Server, label, writing

NODES = [node("vm-vgpus", f"node{number:03}.example.org") for number in range(40)]
FIELDS = {"sandboxWorkloads": {"enabled": True, "defaultWorkload": "vm-vgpus"}}


def status_write(observed_cluster: ObservedCluster) -> PatchPolicyStatus:
    (found,) = (write for write in observed_cluster.decided().writes if isinstance(write, PatchPolicyStatus))
    return found


def test_the_line_of_a_policy_has_its_reason_once() -> None:
    line = status_write(ObservedCluster(policies=[policy(FIELDS)])).text
    assert line.startswith("ClusterPolicy cluster-policy is notReady: ConfigInvalid: ")
    assert line.count("vm-vgpus") == 1
    assert "ConfigInvalid: ConfigInvalid" not in line


async def test_a_write_is_one_short_line_and_an_error_one_line_for_all_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = status_write(ObservedCluster(nodes=NODES))
    assert len(write.text) > 500

    class Policies(Server):
        @override
        async def write(self, write: Write) -> None:
            if not isinstance(write, PatchPolicyStatus):
                await super().write(write)

    clock: SimClock
    with caplog.at_level(logging.INFO):
        async with writing(Policies(refuses={"bad"})) as (writer, clock):
            writer.offer([write, label("bad")])
            await clock.settle()
            await clock.advance(600)
    # asyncio reports each step that a computer under load takes longer for.
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("gpuvirt")]
    assert len(lines) == 2
    assert max(map(len, lines)) < 500
    assert not any("\n" in line for line in lines)


def test_an_invalid_value_is_one_short_line_when_it_appears_and_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    value = InvalidValue("node01", "label", "label x", "ConfigInvalid", "ConfigInvalid: " + "word " * 300)
    with caplog.at_level(logging.INFO):
        log_invalid((), (value,))
        log_invalid((value,), (value,))
        log_invalid((value,), ())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert max(map(len, lines)) < 500


def test_what_was_seen_is_cut_before_the_fix() -> None:
    text = "ConfigInvalid: label a names b; seen: " + "; ".join(["a card without it"] * 60) + "; fix: name c"
    line = logged(text)
    assert len(line) <= MOST_LOGGED
    assert line.startswith("ConfigInvalid: label a names b; seen: a card without it; ")
    assert line.endswith("...; fix: name c")
    assert logged("short; seen: a; fix: b") == "short; seen: a; fix: b"
    assert len(logged("x" * 900 + "; seen: a; fix: " + "y" * 900)) <= MOST_LOGGED + len("...")
