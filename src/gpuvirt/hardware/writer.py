"""The writer: a process that makes the writes of one change, so that the kernel puts only this process to sleep.

`writing` starts this file by its path, once for each change, so it imports next to nothing. Its standard input is a
socket. Each packet there is a request, a letter and an argument, and is answered by a packet, an errno and a text:
`w PATH\\0DATA` writes a file in one system call, `r LIMIT PATH` reads one, `o PATH` opens a node and answers with its
number, `c NUMBER` closes it.
The writer ends when the other end of the socket is closed, which it notices once the kernel returns from a write.
"""

import os
import sys

CHANNEL = 0
PACKET_BYTES = 1 << 16


def serve(proc: str) -> None:
    """Answer requests; `proc` is where the host's `/proc` is seen, whose number of this process is told first."""
    _answer(0, _number_in(proc).encode())
    while packet := os.read(CHANNEL, PACKET_BYTES):
        try:
            said = _obey(packet[:1], packet[2:])
        except OSError as error:
            _answer(error.errno or -1, b"")
        else:
            _answer(0, said)


def _obey(letter: bytes, argument: bytes) -> bytes:
    if letter == b"w":
        path, _, data = argument.partition(b"\0")
        _write(path, data)
    elif letter == b"r":
        limit, _, path = argument.partition(b" ")
        return _read(path, int(limit))
    elif letter == b"o":
        return b"%d" % os.open(argument, os.O_RDWR | os.O_CLOEXEC)
    elif letter == b"c":
        os.close(int(argument))
    return b""


def _write(path: bytes, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _read(path: bytes, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, limit)
    finally:
        os.close(fd)


def _answer(number: int, said: bytes) -> None:
    os.write(CHANNEL, b"%d %b" % (number, said))


def _number_in(proc: str) -> str:
    """Return this process's number there: in a container the host's `/proc` has another than the container's."""
    try:
        return os.readlink(f"{proc}/self")  # noqa: PTH115  pathlib would take longer to import than all else here
    except OSError:  # a simulated host's
        return str(os.getpid())


if __name__ == "__main__":
    serve(sys.argv[1])
