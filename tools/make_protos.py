"""Generates the Python messages of the kubelet's gRPC services; with --check, reports stale ones."""

import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PROTOS = sorted(path.relative_to(SOURCE) for path in SOURCE.glob("gpuvirt/agent/kubelet/proto/*.proto"))


def generate(target: Path) -> None:
    """Write the generated messages below `target`."""
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", f"--python_out={target}", f"--pyi_out={target}"]
        + [str(path) for path in PROTOS],
        check=True,
        cwd=SOURCE,
    )


def main() -> int:
    """Generate the files, or compare them."""
    if "--check" not in sys.argv[1:]:
        generate(SOURCE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = [
            str(path.relative_to(folder))
            for path in sorted(Path(folder).rglob("*_pb2.py*"))
            if path.read_bytes() != (SOURCE / path.relative_to(folder)).read_bytes()
        ]
    if stale:
        print(f"not generated from the current .proto files: {', '.join(stale)}; run make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
