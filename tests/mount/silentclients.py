"""Clients that connect to a port and send nothing; a client that is disconnected connects again at once."""

import asyncio
import sys
from contextlib import suppress


async def keep_silent(port: int) -> None:
    """Connect without sending, again and again."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.read()
            writer.close()


async def keep_all_silent(port: int, count: int) -> None:
    """Run many silent clients."""
    await asyncio.gather(*(keep_silent(port) for _ in range(count)))


if __name__ == "__main__":
    asyncio.run(keep_all_silent(int(sys.argv[1]), int(sys.argv[2])))
