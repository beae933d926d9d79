"""The writer: a process that makes the writes of one change, so that the kernel puts only this process to sleep.

A thread that sleeps there survives SIGKILL, and keeps the locks of its process.

`writing` starts this file by its path, once for each change, so it imports very little. Its standard input is a socket.
Each packet is a request with a letter and an argument; the answer is a packet with an errno and a text:
`w PATH\\0DATA` writes a file in one system call, `r LIMIT PATH` reads a file, `o PATH` opens a node and returns its
file descriptor, `c NUMBER` closes that descriptor.
The writer ends when the other end of the socket is closed, as soon as the kernel has returned from a write.
"""

import os
import sys

CHANNEL = 0
PACKET_BYTES = 1 << 16


def serve(proc: str) -> None:
    """Send this process's pid in the host's `/proc`, which is mounted at `proc`, and then answer requests."""
    _answer(0, _pid_in(proc).encode())
    while packet := os.read(CHANNEL, PACKET_BYTES):
        try:
            result = _execute(packet[:1], packet[2:])
        except OSError as error:
            _answer(error.errno or -1, b"")  # unknown: the asking process raises this number as its OSError
        else:
            _answer(0, result)


def _execute(letter: bytes, argument: bytes) -> bytes:
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


def _answer(number: int, text: bytes) -> None:
    os.write(CHANNEL, b"%d %b" % (number, text))


def _pid_in(proc: str) -> str:
    """Return this process's pid in a `/proc`: the host's pid differs from the one in a container's PID namespace."""
    try:
        return os.readlink(f"{proc}/self")  # noqa: PTH115  pathlib would take longer to import than all else here
    except OSError:  # unknown: the `/proc` of a simulated host
        return str(os.getpid())


if __name__ == "__main__":
    serve(sys.argv[1])
