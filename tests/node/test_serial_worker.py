"""Serial workers: a job that sleeps in the kernel blocks neither the event loop nor the end of the process."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from gpuvirt.loops.serialworker import InlineWorker, ThreadWorker, WorkerBlockedError


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
    with pytest.raises(WorkerBlockedError, match="still blocks an earlier job: unbind"):
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


def test_a_process_ends_while_a_job_sleeps() -> None:
    program = """
import asyncio, threading
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


def test_a_job_cancelled_before_it_starts_does_not_block_the_worker() -> None:
    worker, late = ThreadWorker("test"), Future[None]()
    late.cancel()
    worker._asleep = True
    worker._do(lambda: None, "late", late)
    assert not worker._asleep
