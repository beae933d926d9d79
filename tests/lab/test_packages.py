"""The packages of a kernel are those that apt would install together, also while Debian's archive changes.

apt is the real one; its archive is a folder with small packages.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.kernel.errors import LabError, NotAvailableError
from lab.kernel.modules import check_fit
from lab.kernel.packages import KernelPackages, SourcePackage, find_kernels, find_sources, run, take_newest

from tests.lab.debianarchive import Archive, module

pytestmark = pytest.mark.ring("kernel")

OLD, NEW, NEWER = "6.1.176-1", "6.1.192-2", "6.1.192-3"
COMMON = "linux-headers-6.1.0-56-common"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    archive = Archive(tmp_path / "debian")
    monkeypatch.setenv("APT_CONFIG", archive.apt_config)
    return archive


def taken(folder: Path) -> str:
    """Fetch the newest kernel; return its release with the version of its kbuild."""

    def fetch(packages: KernelPackages) -> str:
        own = folder / f"{packages.release}_{packages.version}"
        image, unpacked = packages.fetch_image(own), Path(tempfile.mkdtemp(dir=own))
        headers, modules = packages.fetch_headers(unpacked), list(image.rglob("*.ko"))
        check_fit(headers / "Module.symvers", modules[0], modules)
        assert (packages.fetch_samples(own) / "mtty.c").exists()
        assert (headers / "Makefile").read_text() == f"include {unpacked}/usr/src/common\n"
        return f"{packages.release} {(unpacked / 'usr/lib/linux-kbuild-6.1/version').read_text()}"

    return take_newest(find_kernels, fetch)


def whole(archive: Archive) -> None:
    archive.add_kernel(56, NEW)


def kbuild_newer(archive: Archive) -> None:
    archive.add_kernel(56, NEW, NEWER)


def image_newer(archive: Archive) -> None:
    archive.add_image(56, NEWER)
    archive.add_headers(56, NEW)
    archive.add_unsigned(NEW)


def image_of_another_build(archive: Archive) -> None:
    archive.add_image(56, NEWER, checksum=2)
    archive.add_headers(56, NEW)


def headers_gone(archive: Archive) -> None:
    archive.add_image(56, NEW)


def common_headers_gone(archive: Archive) -> None:
    archive.add_kernel(56, NEW)
    archive.remove(COMMON, NEW)


def kbuild_older(archive: Archive) -> None:
    archive.add_image(56, NEW)
    archive.add_headers(56, NEW)


def listed_and_absent(archive: Archive) -> None:
    archive.add_kernel(56, NEW)
    archive.remove(COMMON, NEW, listed=True)


def only_the_old(archive: Archive) -> None:
    """The archive has nothing else."""


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (whole, f"6.1.0-56-amd64 {NEW}"),
        (kbuild_newer, f"6.1.0-56-amd64 {NEWER}"),
        (image_newer, f"6.1.0-56-amd64 {NEW}"),
        (image_of_another_build, f"6.1.0-50-amd64 {OLD}"),
        (headers_gone, f"6.1.0-50-amd64 {OLD}"),
        (common_headers_gone, f"6.1.0-50-amd64 {NEW}"),
        (kbuild_older, f"6.1.0-50-amd64 {OLD}"),
        (listed_and_absent, f"6.1.0-50-amd64 {NEW}"),
        (only_the_old, f"6.1.0-50-amd64 {OLD}"),
    ],
)
def test_the_newest_kernel_whose_packages_can_be_fetched_and_fit_is_taken(
    archive: Archive,
    tmp_path: Path,
    newest: Callable[[Archive], None],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive.add_kernel(50, OLD)
    newest(archive)
    assert taken(tmp_path) == expected
    reported = capsys.readouterr().err
    older = "6.1.0-50" in expected and newest is not only_the_old
    assert ("lab: linux-image-6.1.0-50-amd64 6.1.176-1 is taken" in reported) == older, reported
    assert ("linux-image-6.1.0-56-amd64 " in reported) == older, "the reason names the newer one"


def test_headers_that_fit_are_taken_as_soon_as_the_archive_has_them(archive: Archive, tmp_path: Path) -> None:
    archive.add_kernel(50, OLD)
    image_of_another_build(archive)
    assert taken(tmp_path) == f"6.1.0-50-amd64 {OLD}"
    archive.add_headers(56, NEWER, checksum=2)
    archive.add_unsigned(NEWER)
    assert taken(tmp_path) == f"6.1.0-56-amd64 {NEWER}"


def test_a_kernel_that_this_system_does_not_install_is_not_taken(archive: Archive, tmp_path: Path) -> None:
    """Such as one of backports, or of a series that an admin has pinned."""
    archive.add_kernel(50, OLD)
    archive.add_kernel(90, "6.12.9-1")
    archive.prefer("linux-image-amd64", OLD)
    assert taken(tmp_path).startswith("6.1.0-50-amd64 ")


def test_a_source_that_the_archive_lists_and_lacks_is_replaced_by_the_one_before(
    archive: Archive, tmp_path: Path
) -> None:
    for version in ("6.12.115-2", "6.12.117-1"):
        archive.add_source("6.12", version)
    archive.remove("linux-source-6.12", "6.12.117-1", listed=True)

    def unpack(source: SourcePackage) -> str:
        tree = tmp_path / f"source-{source.version}"
        tree.mkdir()
        source.unpack(tree)
        assert (tree / "samples/vfio-mdev/mtty.c").exists()
        return source.version

    assert take_newest(lambda: find_sources("6.12"), unpack) == "6.12.115-2"


def test_an_archive_that_does_not_answer_is_reported(archive: Archive, tmp_path: Path) -> None:
    archive.add_kernel(56, NEW)
    archive.stop()
    with pytest.raises(NotAvailableError, match=r"(?s)apt lists no linux-image-amd64.*apt-get update .* ended with"):
        taken(tmp_path)


def test_a_fault_of_ours_is_no_reason_for_an_older_kernel(archive: Archive) -> None:
    archive.add_kernel(50, OLD)
    archive.add_kernel(56, NEW)
    tried: list[str] = []

    def make(packages: KernelPackages) -> None:
        tried.append(packages.release)
        raise LabError("the modules can't be built")

    with pytest.raises(LabError, match="the modules can't be built"):
        take_newest(find_kernels, make)
    assert tried == ["6.1.0-56-amd64"]


def test_lists_that_are_older_than_the_archive_are_fetched_again(archive: Archive, tmp_path: Path) -> None:
    archive.add_kernel(50, OLD)
    archive.add_kernel(56, NEW)
    run(["apt-get", "update", "-qq"])
    archive.remove("linux-kbuild-6.1", NEW)
    archive.add_unsigned(NEWER)
    assert taken(tmp_path) == f"6.1.0-56-amd64 {NEWER}"


def test_a_kernel_that_is_replaced_after_the_lists_were_read_is_the_next_one(archive: Archive, tmp_path: Path) -> None:
    archive.add_kernel(55, OLD)
    run(["apt-get", "update", "-qq"])
    archive.remove("linux-image-6.1.0-55-amd64", OLD)
    archive.remove("linux-image-amd64", OLD)
    archive.add_kernel(56, NEW)
    assert taken(tmp_path) == f"6.1.0-56-amd64 {NEW}"


def test_an_archive_without_a_kernel_is_refused_with_its_name(archive: Archive, tmp_path: Path) -> None:
    archive.add_unsigned(NEW)
    with pytest.raises(LabError, match="apt lists no linux-image-amd64; Debian 12 has it in bookworm or"):
        taken(tmp_path)


def test_the_reason_of_each_kernel_is_reported_where_none_can_be_taken(archive: Archive, tmp_path: Path) -> None:
    archive.add_image(50, OLD)
    archive.add_kernel(56, NEW, checksum=1)
    archive.remove(COMMON, NEW)
    with pytest.raises(
        LabError, match=r"(?s)linux-image-6.1.0-56-amd64 6.1.192-2: apt-get .*6.1.0-50-amd64 6.1.176-1: "
    ):
        taken(tmp_path)


@pytest.mark.parametrize(
    ("magic", "checksum", "reason"),
    [
        ("6.1.0-56-amd64 SMP", 7, None),
        ("6.1.0-55-amd64 SMP", 7, "the headers build modules for 6.1.0-56-amd64 SMP, and .* is for 6.1.0-55-amd64 SMP"),
        (
            "6.1.0-56-amd64 SMP",
            8,
            "module_layout of .* has the checksum 0x00000008, and 0x00000007 in .*symvers",
        ),
    ],
)
def test_vermagic_and_checksums_decide_whether_modules_fit(
    tmp_path: Path, magic: str, checksum: int, reason: str | None
) -> None:
    built = module(tmp_path, "6.1.0-56-amd64 SMP", 7)
    (tmp_path / "image").mkdir()
    debians = module(tmp_path / "image", magic, checksum)
    symvers = tmp_path / "Module.symvers"
    symvers.write_text("0x00000007\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t\n")
    if reason is None:
        check_fit(symvers, built, [debians])
        return
    with pytest.raises(LabError, match=reason):
        check_fit(symvers, built, [debians])
