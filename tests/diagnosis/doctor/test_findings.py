"""The texts that findings share."""

import errno
import os

import pytest

from gpuvirt.agent.change.steps.leasing import what_failed
from gpuvirt.model.reasons import ReasonCode, Seen, count_of, nodeproblems


@pytest.mark.parametrize(("number", "text"), [(0, "0 GPUs"), (1, "1 GPU"), (8, "8 GPUs")])
def test_a_number_of_gpus_is_a_phrase(number: int, text: str) -> None:
    assert count_of(number, "GPU") == text


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LEDGER = "/var/lib/gpuvirt/ledger.json"


@pytest.mark.parametrize("error", [str(FULL), f"{LEDGER}: {FULL}"])
def test_a_failed_write_names_its_file_and_its_file_system(error: str) -> None:
    reason = nodeproblems.not_written(ReasonCode.LEDGER_NOT_WRITTEN, LEDGER, error, "no vGPU is created for a pod")
    assert reason.seen == f"{LEDGER}: No space left on device"
    assert reason.fix == (
        "free space on the file system of /var/lib/gpuvirt (df /var/lib/gpuvirt), or mount it writable"
    )
    folder = nodeproblems.cdi_not_written("/run/cdi", str(FULL)).fix
    assert folder == "free space on the file system of /run/cdi (df /run/cdi), or mount it writable, or set cdi: none"
    share = nodeproblems.cdi_not_written("/run/cdi/a.json", str(FULL), is_share=True)
    assert (share.seen, (share.fix or "").split(" (")[0]) == (
        "/run/cdi/a.json: No space left on device", "free space on the file system of /run/cdi",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (FULL, Seen("", "No space left on device")),
        (OSError(errno.EROFS, "Read-only file system", "/sys/a"), Seen("/sys/a", "Read-only file system")),
        (OSError("the disk"), Seen("", "the disk")),
        (ValueError("a program"), Seen("", "a program")),
    ],
)
def test_an_error_without_a_file_names_none(error: Exception, seen: Seen) -> None:
    assert what_failed(error) == seen
