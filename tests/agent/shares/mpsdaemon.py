"""A stand-in for NVIDIA's MPS daemon and its control program: as slow, deaf and strict as the real one can be.

It says what driver 580.159.04 said on an H200. Its clients speak a language of their own, since that of the real one is
not published: `client LIMIT`, then `alloc MIB`.
"""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent

MOST = 48
HEADINGS = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        "
PROGRAM = f"""\
    #!{sys.executable}
    import os, socket, sys
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    control.sendall(b"ui\\n" + sys.stdin.buffer.read())
    control.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: control.recv(4096), b""))
    if not answer:
        sys.exit("Cannot send command to MPS control daemon process")
    print(answer.decode(), end="")
    """


def write_program(root: Path) -> None:
    """Write the control program into the root of a driver."""
    program = root / "usr/bin/nvidia-cuda-mps-control"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(dedent(PROGRAM))
    program.chmod(0o755)


@dataclass(slots=True)
class MpsDaemon:
    """A daemon with the sockets in a folder."""

    pipes: Path
    gpu: str = "GPU-a"
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    knows_ps: bool = True
    quitting: bool = False
    refused_quits: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is no client."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    garbled: bool = False
    clients: list[int] = field(default_factory=list)

    async def start(self) -> asyncio.Server:
        self.answering.set()
        self.unused.set()
        self.pipes.mkdir(parents=True, exist_ok=True)
        (self.pipes / "control_privileged").touch()
        (self.pipes / "control").unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, self.pipes / "control")
        (self.pipes / "control").chmod(0o666)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            first = (await reader.readline()).decode().split()
            if first == ["ui"]:
                await self.answering.wait()
                await self._answer((await reader.read()).decode().splitlines(), writer)
            elif first[:1] == ["client"]:
                await self._serve_client(first[1], reader, writer)
        writer.close()

    async def _answer(self, commands: list[str], writer: asyncio.StreamWriter) -> None:
        if commands == ["quit"] and self.refused_quits > 0:
            self.refused_quits -= 1
        elif commands == ["quit"] and not self.quitting:
            self.quitting = True
            await self.unused.wait()
            self.ended.set()
        else:
            writer.write(self._answered(commands).encode())
            await writer.drain()

    def _answered(self, commands: list[str]) -> str:
        if self.quitting:
            return ""
        if self.garbled:
            return "what\n"
        answers = {"get_default_active_thread_percentage": "100.0\n", "ps": self._list(), "get_server_list": "1401\n"}
        return (
            "\n"
            if not commands
            else "".join(answers.get(command, f'Unknown command "{command}"\n') for command in commands)
        )

    def _list(self) -> str:
        if not self.knows_ps:
            return 'Unknown command "ps"\n'
        if not self.clients:
            return "Server not found\n"
        rows = (f"{pid}  {at}  1401  {self.gpu[:22]}  4026531836  /tmp/train" for at, pid in enumerate(self.clients))
        return "\n".join((HEADINGS, *rows, ""))

    async def _serve_client(self, limit: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give a client memory up to its own limit, `GPU-a=4915M`; it knows no other client's."""
        if len(self.clients) >= MOST:
            writer.write(b"808\n")
            return
        gpu, _, most = limit.partition("=")
        left = int(most.removesuffix("M")) if gpu == self.gpu else 0
        self.clients.append(len(self.clients) + 1000)
        self.unused.clear()
        try:
            while line := (await reader.readline()).decode().split():
                has_room = int(line[1]) <= left
                left -= int(line[1]) if has_room else 0
                writer.write(b"ok\n" if has_room else b"2\n")
                await writer.drain()
        finally:
            self.clients.pop()
            if not self.clients:
                self.unused.set()


async def _run(pipes: Path, gpu: str, refused_quits: int) -> None:
    daemon = MpsDaemon(pipes, gpu, refused_quits=refused_quits)
    async with await daemon.start():
        await daemon.ended.wait()


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), sys.argv[2], int("".join(sys.argv[3:]) or 0)))
