"""Archives: packed members are unpacked, and a truncated, foreign or malicious archive is refused."""

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuvirt import archive
from gpuvirt.archive import Folder, Members, Symlink, pack
from gpuvirt.errors import DamagedError
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.archives.hostcopy import copy_host
from gpuvirt.hardware.scan import scan
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.archives import unpacking
from gpuvirt_sim.archives.archived import ArchivedKernel
from gpuvirt_sim.archives.unpacking import unpack
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import host_names, load_host
from tests.cli.support.archives import MANIFEST, packed, unpack_with_tar
from tests.sim.simulated import Simulated
from tests.thoroughness import examples

TOP = "gpuvirt-support-node-1"


def test_packed_members_are_unpacked() -> None:
    members: Members = {
        "host/a/b": b"1\n",
        "host/a/c": Symlink("../a/b"),
        "host/empty": Folder(),
        "logs/x": b"not the host's",
    }
    found = unpack(io.BytesIO(pack(TOP, MANIFEST, members)))
    assert found.manifest == MANIFEST
    assert found.host == {"a/b": b"1\n", "a/c": Symlink("../a/b"), "empty": Folder()}


def test_packing_is_reproducible() -> None:
    copies = [packed(copy_host(build_host(load_host("4xT4")))) for _ in range(2)]
    assert copies[0] == copies[1]


@pytest.mark.parametrize("name", host_names())
def test_the_unpacked_host_folder_is_a_host(simulated: Simulated, tmp_path: Path, name: str) -> None:
    kernel = simulated(name)
    unpack_with_tar(packed(copy_host(kernel)), tmp_path)
    found = scan(RealKernel(HostRoots.under(tmp_path / TOP / "host")))
    assert found == scan(kernel)


# --- malicious and foreign archives


def tar_of(*members: tuple[tarfile.TarInfo, bytes], manifest: bytes | None = None) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        content = msgspec.json.encode(MANIFEST) if manifest is None else manifest
        for member, body in [(tarfile.TarInfo(f"{TOP}/MANIFEST.json"), content), *members]:
            member.size = member.size or len(body)
            tar.addfile(member, io.BytesIO(body))
    return target.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b"" if kind != tarfile.REGTYPE else b"x"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("/etc/passwd"), "outside its folder: /etc/passwd"),
        (member(f"{TOP}/host/../../../etc/cron.d/x"), "outside its folder"),
        (member("other/host/x"), f"outside its folder {TOP}: other/host/x"),
        (member(f"{TOP}/host/x", tarfile.SYMTYPE, "/etc"), "a link that leads out of its folder"),
        (member(f"{TOP}/host/sys/x", tarfile.SYMTYPE, "../../MANIFEST.json"), "a link that leads out of its folder"),
        (member(f"{TOP}/host/sys/x", tarfile.SYMTYPE, "a/../../../x/host/sys"), "a link that leads out of its folder"),
        (member(f"{TOP}/x", tarfile.SYMTYPE, "host"), "a link that leads out of its folder"),
        (member(f"{TOP}/host/x", tarfile.LNKTYPE, f"{TOP}/MANIFEST.json"), "not a file, link or folder"),
        (member(f"{TOP}/host/x", tarfile.CHRTYPE), "not a file, link or folder"),
        (member(f"{TOP}/host/x", tarfile.FIFOTYPE), "not a file, link or folder"),
        (member(f"{TOP}/host/" + "x/" * 2000), "outside its folder"),
        (member(f"{TOP}/host/\x1b[2J", tarfile.FIFOTYPE), r"\\x1b\[2J"),
    ],
)
def test_a_malicious_member_is_refused(bad: tuple[tarfile.TarInfo, bytes], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        unpack(io.BytesIO(tar_of(bad)))


def test_a_member_below_a_file_member_is_refused() -> None:
    twice = tar_of(member(f"{TOP}/host/x"), member(f"{TOP}/host/x/y"))
    with pytest.raises(DamagedError, match="below one that is no folder"):
        ArchivedKernel(unpack(io.BytesIO(twice)))


def test_symlink_cycles_end() -> None:
    loop = tar_of(
        member(f"{TOP}/host/sys/bus/pci/devices", tarfile.SYMTYPE, "devicez"),
        member(f"{TOP}/host/sys/bus/pci/devicez", tarfile.SYMTYPE, "devices"),
    )
    assert scan(ArchivedKernel(unpack(io.BytesIO(loop)))).functions == {}


def test_a_file_of_the_host_has_a_size() -> None:
    big = (tarfile.TarInfo(f"{TOP}/host/sys/big"), b"0" * (archive.MOST_FILE_BYTES + 1))
    with pytest.raises(DamagedError, match="sys/big has 1,048,577 bytes; expected at most 1 MiB"):
        unpack(io.BytesIO(tar_of(big)))


def test_a_decompression_bomb_is_refused_before_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_UNPACKED_BYTES", 4 << 20)
    bomb = (tarfile.TarInfo(f"{TOP}/logs/x"), b"0" * (8 << 20))
    with pytest.raises(DamagedError, match="unpacks to more than 4 MiB"):
        unpack(io.BytesIO(tar_of(bomb)))


def test_an_archive_with_too_many_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MOST_MEMBERS", 100)
    with pytest.raises(DamagedError, match="more than 100 members"):
        unpack(io.BytesIO(tar_of(*(member(f"{TOP}/logs/{number}") for number in range(101)))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a complete tar.gz|not a support archive"),
        (b"hello", "is not a complete tar.gz"),
        (gzip.compress(b""), "is not a complete tar.gz: empty file"),
        (gzip.compress(b"hello" * 1000), "is not a complete tar.gz"),
        (tar_of(manifest=b"{}"), "of another program"),
        (tar_of(manifest=b"\xff"), "of another program"),
        (
            tar_of(manifest=b'{"format": 2}'),
            "has format 2, but this gpuvirt reads 1; use the version of gpuvirt that wrote it",
        ),
    ],
    ids=["nothing", "text", "gzip of nothing", "gzip of text", "json", "no json", "newer"],
)
def test_a_foreign_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        unpack(io.BytesIO(content))


def test_a_tar_of_another_program_is_refused() -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as tar:
        tar.addfile(*((info := tarfile.TarInfo("x/y")), io.BytesIO()))
        assert info.size == 0
    with pytest.raises(DamagedError, match=r"not a support archive of gpuvirt: it has no MANIFEST\.json"):
        unpack(io.BytesIO(target.getvalue()))


WHOLE = packed(copy_host(build_host(load_host("2xA10"))))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_archive_is_refused(share: float) -> None:
    with pytest.raises(DamagedError):
        unpack(io.BytesIO(WHOLE[: int(len(WHOLE) * share)]))


RAW = gzip.decompress(WHOLE)


@given(st.integers(0, len(RAW) - 1), st.binary(min_size=1, max_size=600))
@example(124, b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00")
@example(156, b"L")
@example(156, b"S")
@settings(deadline=None, max_examples=examples(300))
def test_a_damaged_archive_is_read_or_refused(at: int, junk: bytes) -> None:
    """Any content raises no other error and does not hang."""
    damaged = RAW[:at] + junk + RAW[at + len(junk) :]
    try:
        scan(ArchivedKernel(unpack(io.BytesIO(gzip.compress(damaged, 1)))))
    except DamagedError:
        return


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
@settings(deadline=None, max_examples=examples(100))
def test_a_flipped_byte_is_read_or_refused(at: int, change: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[at] ^= change
    try:
        unpack(io.BytesIO(bytes(damaged)))
    except DamagedError:
        return


# --- the command


def sim_import(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuvirt", "sim", "import", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "content", [b"hello", WHOLE[:900], tar_of(member("/etc/passwd"))], ids=["text", "truncated", "malicious"]
)
def test_a_damaged_archive_exits_with_1_and_writes_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.tar.gz").write_bytes(content)
    done = sim_import(str(tmp_path / "bad.tar.gz"), "-o", str(tmp_path / "host.yaml"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"gpuvirt: {tmp_path}/bad.tar.gz: ")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.gz"]


def test_a_missing_archive_exits_with_2(tmp_path: Path) -> None:
    assert sim_import(str(tmp_path / "none.tar.gz")).returncode == 2


def test_an_import_writes_a_host_file_and_reports_losses(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath("/sys/bus/pci/devices/0000:65:00.0/numa_node"), b"many\n")
    (tmp_path / "host.tar.gz").write_bytes(packed(copy_host(kernel)))
    done = sim_import(str(tmp_path / "host.tar.gz"), "-o", str(tmp_path / "host.yaml"))
    assert done.returncode == 0
    assert "0000:65:00.0: unread: " in done.stderr
    assert load_host(str(tmp_path / "host.yaml")).slots[0].at == "0000:00:1f.0"
    assert sim_import(str(tmp_path / "host.tar.gz")).stdout == (tmp_path / "host.yaml").read_text()
