"""Images without a registry: docker archives that containerd imports."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

PREFIX = "docker.io/local"
APPLETS = ("sh", "sleep", "env", "ls", "cat", "echo", "test", "true", "printenv", "id", "grep", "stat", "wget")
FOLDERS = ("bin", "tmp", "etc", "proc", "sys", "dev")


def busybox(binary: Path) -> bytes:
    """Return a layer with a static busybox and links for its commands."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as layer:
        for folder in FOLDERS:
            layer.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        content = binary.read_bytes()
        program = _entry("bin/busybox", tarfile.REGTYPE, 0o755)
        program.size = len(content)
        layer.addfile(program, io.BytesIO(content))
        for applet in APPLETS:
            link = _entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777)
            link.linkname = "busybox"
            layer.addfile(link)
    return data.getvalue()


def write_archive(
    path: Path, reference: str, layer: Path | bytes, command: Sequence[str], search: str = "/bin"
) -> None:
    """Write a docker archive of one layer; `reference` is the full name, such as `docker.io/local/box:1`."""
    content = layer if isinstance(layer, bytes) else layer.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(command), "Env": [f"PATH={search}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{}],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(path, "w") as archive:
        for entry, data in (
            (config_name, config),
            (f"{digest}/layer.tar", content),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = _entry(entry, tarfile.REGTYPE, 0o644)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = kind, mode
    return info
