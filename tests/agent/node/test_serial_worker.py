"""Serial workers: a job that sleeps in the kernel blocks neither the event loop nor the end of the process."""

import asyncio
import subprocess
import sys
import threading

import pytest

from gpuvirt.clock import BEAT_S, Signal
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError, WorkerBusyError
from tests.inlineworker import InlineWorker


@pytest.mark.parametrize("worker", [InlineWorker(), ThreadWorker("test")])
async def test_a_worker_returns_results_and_raises_errors(worker: InlineWorker | ThreadWorker) -> None:
    assert await worker.run(lambda: 42, name="answer", timeout_s=5) == 42

    def fail() -> None:
        raise OSError("as it was")

    with pytest.raises(OSError, match="as it was"):
        await worker.run(fail, name="fail", timeout_s=5)
    assert await worker.run(lambda: 43, name="answer", timeout_s=5) == 43


async def test_a_job_that_sleeps_blocks_its_worker_until_it_wakes() -> None:
    worker, wake, woke = ThreadWorker("test"), threading.Event(), threading.Event()

    def sleep() -> None:
        wake.wait()
        woke.set()

    with pytest.raises(WorkerBlockedError, match=r"has blocked this job for [0-9.]+ s: unbind"):
        await worker.run(sleep, name="unbind", timeout_s=0.01)
    with pytest.raises(WorkerBusyError, match="still blocks an earlier job: unbind"):
        await worker.run(lambda: 42, name="answer", timeout_s=5)
    wake.set()
    assert woke.wait(100)
    while True:
        try:
            assert await worker.run(lambda: 42, name="answer", timeout_s=5) == 42
        except WorkerBlockedError:
            continue
        break


async def test_a_timeout_error_of_a_job_does_not_block_the_worker() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await ThreadWorker("test").run(fail, name="fail", timeout_s=5)


@pytest.mark.parametrize("failure", [None, OSError("as it was")])
async def test_a_process_that_was_stopped_takes_the_result_that_came_meanwhile(failure: OSError | None) -> None:
    """A stopped process continues after the job's time, and the job has ended by then: nothing blocks it."""
    worker, stopped, ended = ThreadWorker("test"), threading.Event(), threading.Event()

    def answer() -> int:
        assert stopped.wait(100)
        ended.set()
        if failure is not None:
            raise failure
        return 42

    def stop() -> None:
        stopped.set()
        assert ended.wait(100)
        assert threading.Event().wait(0.5) is False  # the job's time is over, and its thread has stored the result

    asyncio.get_running_loop().call_soon(stop)
    result = worker.run(answer, name="answer", timeout_s=0.2)
    if failure is None:
        assert await result == 42
    else:
        with pytest.raises(OSError, match="as it was"):
            await result
    assert await worker.run(lambda: 43, name="answer", timeout_s=5) == 43


@pytest.mark.parametrize(("stopped_s", "rest_s"), [(2.0 + BEAT_S + 0.1, 0.1), (1.8, 0.4)])
async def test_a_job_that_was_stopped_with_its_process_has_its_time_again(stopped_s: float, rest_s: float) -> None:
    """A stop may end after the job's time, or before it."""
    worker, gone_on = ThreadWorker("test"), threading.Event()

    def stop() -> None:
        assert threading.Event().wait(stopped_s) is False
        gone_on.set()

    def answer() -> int:
        assert gone_on.wait(100)
        assert threading.Event().wait(rest_s) is False
        return 42

    asyncio.get_running_loop().call_soon(stop)
    assert await worker.run(answer, name="answer", timeout_s=2.0) == 42


def test_a_process_ends_while_a_job_sleeps() -> None:
    program = """
import asyncio, threading
from gpuvirt.clock import Signal
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError
async def main():
    try:
        await ThreadWorker("test").run(threading.Event().wait, name="unbind", timeout_s=0.01)
    except WorkerBlockedError:
        print("blocked")
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "blocked\n")


async def test_a_job_that_waits_behind_another_for_too_long_is_never_run() -> None:
    worker, began, wake, ran = ThreadWorker("test"), Signal(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def first() -> bool:
        loop.call_soon_threadsafe(began.set)
        return wake.wait(100)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(worker.run(first, name="first", timeout_s=100))
        await began.wait()
        with pytest.raises(WorkerBlockedError, match=r"has blocked this job for 0.01 s: first"):
            await worker.run(ran.set, name="second", timeout_s=0.01)
        wake.set()
        assert await running
    assert await worker.run(lambda: 42, name="third", timeout_s=5) == 42
    assert not ran.is_set()
