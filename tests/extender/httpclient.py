"""A client of the extender's HTTP server that sends any bytes."""

import asyncio

import msgspec

from tests.extender.pods import pod

FILTER = msgspec.json.encode({"Pod": pod("p", 300), "NodeNames": ["n1"]})


class Connection:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next answer."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(20):
            return await self.reader.read(1) == b""


def request(path: str = "/filter", body: bytes = FILTER, *, method: str = "POST", **headers: str) -> bytes:
    given = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def ask(port: int, content: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return the answer to a request on a connection of its own."""
    client = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        await client.send(content)
        return await client.answer()
    finally:
        client.writer.transport.abort()
