"""bind: one write with node and GPUs; what failed and what may have been made are told apart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.extender.intervals import ExtenderIntervals
from tests.extender.binderbench import Bench, benched
from tests.extender.pods import node, pod

REFUSED = 500, {"message": "etcdserver: request timed out"}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with benched(tmp_path) as bench:
        yield bench


async def test_a_pod_gets_its_node_and_its_gpu_in_one_write(bench: Bench) -> None:
    bench.add(pod("p", 300))
    assert await bench.bind("p") == ""
    (sent,) = bench.api.bindings
    assert sent == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "p",
            "namespace": "default",
            "uid": "uid-p",
            "resourceVersion": "11",
            "annotations": {"gpuvirt.io/shares": '{"containers":{"c0":{"GPU-b":300}},"enforcement":"none"}'},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n"},
    }
    assert bench.api.annotations("default/p")["example.com/own"] == "kept"
    assert bench.known.free("n") == {"a": 1000, "b": 200}
    bench.report("p")
    assert bench.known.free("n") == {"a": 1000, "b": 200}


async def test_equal_pods_at_once_never_share_a_piece(bench: Bench) -> None:
    for number in range(8):
        bench.add(pod(f"p{number}", 400))
    errors = await asyncio.gather(*(bench.bind(f"p{number}") for number in range(8)))
    assert sum(not error for error in errors) == 3
    assert {error.partition(" does not fit")[2] for error in errors if error} == {
        " on node n: 400 units of nvidia.com/vgpu requested, its largest free piece is 200"
    }
    assert bench.known.free("n") == {"a": 200, "b": 100}


async def test_a_pod_of_another_uid_is_not_bound(bench: Bench) -> None:
    bench.add(pod("p", 300, uid="later"))
    assert "has the UID later; expected uid-p" in await bench.bind("p")
    assert bench.api.bindings == []


async def test_a_pod_that_is_gone_is_not_bound(bench: Bench) -> None:
    assert await bench.bind("p") == "pod default/p is gone"


async def test_a_pod_without_the_resource_is_left_to_kube_scheduler(bench: Bench) -> None:
    bench.api.put("pods", {"metadata": {"name": "p", "namespace": "default", "uid": "uid-p"}, "spec": {}})
    assert await bench.bind("p") == "pod default/p requests no nvidia.com/vgpu; kube-scheduler should bind it itself"


async def test_a_pod_of_0_units_is_bound_without_gpus(bench: Bench) -> None:
    """It names the resource, so that kube-scheduler leaves its binding to the extender."""
    bench.add(pod("p", 0))
    assert await bench.bind("p") == ""
    assert bench.api.node_of("default/p") == "n"
    assert "gpuvirt.io/shares" not in bench.api.annotations("default/p")


async def test_a_pod_that_requires_limits_is_bound_only_where_shares_are_limits(bench: Bench) -> None:
    bench.add(pod("p", 300, enforcement="required"))
    assert "is not bound to node n: the pod requires enforced shares" in await bench.bind("p")
    assert bench.known.free("n") == {"a": 1000, "b": 500}
    bench.known.nodes(node("n", "hami-core", a=1000, b=500), node("m", c=1000))
    assert await bench.bind("p") == ""
    bench.add(pod("q", 300, enforcement="yes"))
    assert "expected required, or no annotation" in await bench.bind("q")


async def test_a_pod_is_bound_as_soon_as_it_is_observed(bench: Bench) -> None:
    bench.api.put("pods", pod("p", 300))
    error, _ = await asyncio.gather(bench.bind("p"), report_later(bench, "p"))
    assert error == ""


async def report_later(bench: Bench, name: str) -> None:
    await RealClock().sleep(0.05)
    bench.report(name)


async def test_a_pod_that_is_bound_stays_where_it_is(bench: Bench) -> None:
    bench.add(pod("p", 300, on="n", gpus=[{"a": 300}]))
    assert await bench.bind("p", to="n") == ""
    assert await bench.bind("p", to="m") == "pod default/p is bound to node n already, not to m"
    assert bench.api.bindings == []


@pytest.mark.parametrize("units", [1500, -5, "x"])
async def test_an_impossible_request_is_refused(bench: Bench, units: int | str) -> None:
    bench.add(pod("p", units))
    assert str(units) in await bench.bind("p")


@pytest.mark.parametrize(("to", "why"), [("n", "its largest free piece is 1000"), ("x", "it shares no GPUs")])
async def test_a_node_without_room_is_refused(bench: Bench, to: str, why: str) -> None:
    bench.add(pod("p", "2k"))
    assert (await bench.bind("p", to=to)).endswith(f"2000 units of nvidia.com/vgpu requested, {why}")


async def test_a_process_that_does_not_lead_writes_nothing(bench: Bench) -> None:
    bench.add(pod("p", 300))
    bench.lease.held = False
    assert "does not lead" in await bench.bind("p")
    assert bench.api.bindings == []


async def test_the_api_servers_refusal_frees_what_was_reserved(bench: Bench) -> None:
    for name, content in (
        ("replaced", pod("replaced", 300, uid="later")),
        ("elsewhere", pod("elsewhere", 300, on="m")),
        ("removed", None),
    ):
        bench.known.pods(pod(name, 300))
        if content is not None:
            bench.api.put("pods", content)
        assert "was not bound to node n" in await bench.bind(name)
        assert bench.known.free("n") == {"a": 1000, "b": 500}, name


async def test_a_write_that_was_made_but_answered_by_an_error_counts(bench: Bench) -> None:
    bench.add(pod("p", 300))
    bench.api.faults.after_write.append(REFUSED)
    assert await bench.bind("p") == ""
    assert bench.known.free("n") == {"a": 1000, "b": 200}


async def test_a_write_that_is_never_answered_is_looked_up(tmp_path: Path) -> None:
    async with benched(tmp_path, ExtenderIntervals(write_s=0.3)) as bench:
        bench.add(pod("p", 300))
        bench.api.faults.silent = True
        assert await bench.bind("p") == ""


async def test_a_write_of_unknown_outcome_keeps_its_units_and_is_tried_again_as_it_was(bench: Bench) -> None:
    bench.add(pod("p", 300))
    bench.api.faults.before_write.append(REFUSED)
    bench.api.faults.changes_fail = True
    assert "etcdserver: request timed out" in await bench.bind("p")
    assert bench.known.free("n") == {"a": 1000, "b": 200}, "the API server may still make the write"
    bench.add(pod("q", 150))
    assert await bench.bind("q") == ""
    assert await bench.bind("p") == ""
    first, _, again = bench.api.bindings
    assert first == again


async def test_a_pod_that_cannot_be_read_either_is_reported(bench: Bench) -> None:
    bench.add(pod("p", 300))
    bench.api.faults.after_write.append(REFUSED)
    bench.api.faults.reads_fail = True
    assert "whether it is bound is not known" in await bench.bind("p")
    assert bench.known.free("n") == {"a": 1000, "b": 200}


async def test_two_requests_for_one_pod_make_one_write(bench: Bench) -> None:
    bench.add(pod("p", 300))
    errors = await asyncio.gather(bench.bind("p"), bench.bind("p"))
    assert sorted(errors) == ["", "pod default/p is being bound to node n"]
    assert len(bench.api.bindings) == 1


async def test_containers_and_init_containers_are_in_the_annotation(bench: Bench) -> None:
    bench.add(pod("p", 600, 400, init=[1000]))
    assert await bench.bind("p") == ""
    shares = msgspec.json.decode(bench.api.annotations("default/p")["gpuvirt.io/shares"])
    assert shares["containers"] == {"c0": {"GPU-a": 600}, "c1": {"GPU-a": 400}, "i0": {"GPU-a": 1000}}
