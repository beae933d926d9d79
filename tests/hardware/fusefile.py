"""A FUSE file system with one file, `file`; after a line of standard input, it prints each request, and answers none.

python fusefile.py FOLDER UID OPTIONS...    # the user whom the file system belongs to
"""

import os
import stat
import sys
import threading

import mfusepy
from typing_extensions import override


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


class OneFile(mfusepy.Operations):
    use_ns = True

    def __init__(self) -> None:
        self._hung = threading.Event()

    @override
    def init(self, path: str) -> None:
        def hang() -> None:
            sys.stdin.readline()
            self._hung.set()
            say("hung")

        threading.Thread(target=hang, daemon=True).start()
        say("mounted")

    @override
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if self._hung.is_set():
            say(f"getattr {path}")
            threading.Event().wait()
        kind = stat.S_IFDIR if path == "/" else stat.S_IFREG
        return {"st_mode": kind | 0o755, "st_size": 4096, "st_nlink": 1}


if __name__ == "__main__":
    folder, uid, *options = sys.argv[1:]
    os.setresgid(int(uid), -1, -1)
    os.setresuid(int(uid), -1, -1)  # libfuse names the real user to the kernel
    libfuse: dict[str, bool | int] = {"foreground": True, "attr_timeout": 0, **dict.fromkeys(options, True)}
    mfusepy.FUSE(OneFile(), folder, False, "utf-8", "surrogateescape", **libfuse)
