"""An archive of Debian packages in a folder, as apt reads it: small packages with the names of a kernel's."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from lab.kernel.packages import run

APT_CONF = """
Dir::State "{folder}/state"; Dir::Cache "{folder}/cache"; Dir::State::status "{folder}/status";
Dir::Etc "{folder}/etc"; Dir::Etc::sourcelist "sources.list"; Dir::Etc::preferences "preferences";
APT::Architecture "amd64"; Acquire::Languages "none";
"""
ETC = tuple(f"etc/{name}.d" for name in ("apt.conf", "auth.conf", "preferences", "sources.list", "trusted.gpg"))
MODULE = """
static const char magic[] __attribute__((section(".modinfo"), used)) = "vermagic={magic}";
struct version {{ unsigned long sum; char name[56]; }};
static const struct version versions[] __attribute__((section("__versions"), used)) = {{{{ {sum}, "module_layout" }}}};
"""


def module(folder: Path, magic: str, checksum: int) -> Path:
    """Return a file with what the kernel compares when it loads a module that uses one symbol."""
    source, path = folder / "module.c", folder / f"{magic.partition(' ')[0]}-{checksum}.ko"
    source.write_text(MODULE.format(magic=magic, sum=checksum))
    run(["gcc", "-c", "-o", str(path), str(source)])
    return path


class Archive:
    """The archive, and apt's state on a system that has read nothing of it yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listed: dict[tuple[str, str], str] = {}
        for name in ("archive", "state/lists/partial", "cache/archives/partial", *ETC):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "etc/sources.list").write_text(f"deb [trusted=yes] file:{folder}/archive ./\n")
        (folder / "apt.conf").write_text(APT_CONF.format(folder=folder))

    @property
    def apt_config(self) -> str:
        """The value of APT_CONFIG by which programs of apt read this archive alone."""
        return str(self._folder / "apt.conf")

    def add(self, name: str, version: str, depends: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Add a package."""
        root = self._folder / "root"
        for path, content in {"DEBIAN/control": b"", **(files or {})}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\n"
        control += f"Depends: {depends}\n" if depends else ""
        control += "Description: a package of the tests\n"
        (root / "DEBIAN/control").write_text(control)
        deb = self._folder / "archive" / f"{name}_{version}_amd64.deb"
        run(["dpkg-deb", "--build", "-Znone", str(root), str(deb)])
        shutil.rmtree(root)
        content = deb.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        self._listed[name, version] = f"{control}Filename: ./{deb.name}\nSize: {len(content)}\nSHA256: {digest}\n"
        self._list()

    def add_kernel(self, abi: int, version: str, others: str | None = None, checksum: int = 1) -> None:
        """Add the packages of a kernel; `others` is the version of the packages that are not signed."""
        self.add_image(abi, version, checksum)
        self.add_headers(abi, version, checksum)
        self.add_unsigned(others or version)

    def add_image(self, abi: int, version: str, checksum: int = 1) -> None:
        """Add a signed image, and the package that requires the newest one."""
        release = f"6.1.0-{abi}-amd64"
        content = module(self._folder, release, checksum).read_bytes()
        files = {f"boot/vmlinuz-{release}": b"", f"lib/modules/{release}/vfio.ko": content}
        self.add(f"linux-image-{release}", version, files=files)
        self.add("linux-image-amd64", version, f"linux-image-{release} (= {version})")

    def add_headers(self, abi: int, version: str, checksum: int = 1) -> None:
        """Add the headers of an image."""
        release, common = f"6.1.0-{abi}-amd64", f"linux-headers-6.1.0-{abi}-common"
        folder = f"usr/src/linux-headers-{release}"
        symbols = f"{checksum:#010x}\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t\n".encode()
        files = {f"{folder}/Makefile": b"include /usr/src/common\n", f"{folder}/Module.symvers": symbols}
        self.add(common, version)
        depends = f"{common} (= {version}), linux-kbuild-6.1 (>= {version}), linux-compiler-gcc-12-x86"
        self.add(f"linux-headers-{release}", version, depends, files)

    def add_unsigned(self, version: str) -> None:
        """Add the packages that have one version in the archive, whatever the images' are."""
        self.add("linux-kbuild-6.1", version, files={"usr/lib/linux-kbuild-6.1/version": version.encode()})
        self.add("linux-compiler-gcc-12-x86", version)
        self.add_source("6.1", version)

    def add_source(self, series: str, version: str) -> None:
        """Add the source of a series."""
        source, name = io.BytesIO(), f"linux-source-{series}"
        with tarfile.open(fileobj=source, mode="w:xz") as archive:
            archive.addfile(tarfile.TarInfo(f"{name}/samples/vfio-mdev/mtty.c"))
        self.add(name, version, files={f"usr/src/{name}.tar.xz": source.getvalue()})

    def remove(self, name: str, version: str, *, listed: bool = False) -> None:
        """Remove a package, and let the archive list it nevertheless where it is `listed`."""
        (self._folder / "archive" / f"{name}_{version}_amd64.deb").unlink()
        if not listed:
            del self._listed[name, version]
        self._list()

    def prefer(self, name: str, version: str) -> None:
        """Have the system prefer a version of a package, as an admin does."""
        (self._folder / "etc/preferences").write_text(f"Package: {name}\nPin: version {version}\nPin-Priority: 1001\n")

    def stop(self) -> None:
        """Let the archive answer no request any more."""
        shutil.rmtree(self._folder / "archive")

    def _list(self) -> None:
        (self._folder / "archive/Packages").write_text("\n".join(self._listed.values()))
