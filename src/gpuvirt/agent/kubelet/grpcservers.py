"""Starts and stops gRPC servers as a whole, also where the task that does so is cancelled.

A start of grpc.aio that is cancelled may leave a running server, which then fails once its start is reported; a stop
that is cancelled leaves one that never ends (grpcio 1.85, `aio/server.pyx.pxi`: `start` and `shutdown`). Both take a
few turns of the event loop, and the grace period of the stop at most.
"""

import asyncio
from collections.abc import Coroutine

import grpc.aio


async def start(server: grpc.aio.Server) -> None:
    """Start a server; where the caller is cancelled meanwhile, it has started, and the caller must stop it."""
    await _whole(server.start())


async def stop(server: grpc.aio.Server, grace_s: float | None) -> None:
    """Stop a server, which may not have started; its calls may go on for the grace period."""
    await _whole(server.stop(grace_s))


async def _whole(step: Coroutine[object, object, None]) -> None:
    """Run a step to its end; be cancelled afterwards, where the caller was cancelled meanwhile."""
    task = asyncio.ensure_future(step)  # noqa: TID251  it ends below; a group would cancel it
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()
