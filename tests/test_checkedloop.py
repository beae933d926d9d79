"""The event loop of tests refuses what asyncio's debug mode refuses."""

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import FrameType

import pytest

from tests.checkedloop import CheckedLoop, OtherThreadError


def ends(loop: asyncio.AbstractEventLoop) -> None:
    """End a future that a task awaits, which the loop is to continue."""
    future = loop.create_future()
    future.add_done_callback(print)
    future.set_result(None)


@pytest.mark.parametrize(
    "schedule",
    [lambda loop: loop.call_soon(print), lambda loop: loop.call_later(1, print), ends],
    ids=["call_soon", "call_later", "the end of a future"],
)
async def test_another_thread_schedules_nothing(schedule: Callable[[asyncio.AbstractEventLoop], object]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CheckedLoop)
    with ThreadPoolExecutor(1) as threads, pytest.raises(OtherThreadError, match="expected call_soon_threadsafe"):
        await asyncio.wrap_future(threads.submit(schedule, loop))


async def test_another_thread_wakes_a_loop_as_asyncio_says() -> None:
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(loop.call_soon_threadsafe, woken.set)
        assert await woken.wait()


class Timeout(BaseException):
    """The exception of a timeout, raised wherever the process is."""


def time_out(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Timeout


async def interrupted() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_a_timeout_ends_a_test_although_another_task_gets_it() -> None:
    before = signal.signal(signal.SIGALRM, time_out)
    try:
        with closing(CheckedLoop()) as loop:
            task = loop.create_task(interrupted())
            with pytest.raises(Timeout):
                loop.run_until_complete(loop.create_future())
        assert isinstance(task.exception(), Timeout)
        assert signal.getsignal(signal.SIGALRM) is time_out
    finally:
        signal.signal(signal.SIGALRM, before)
