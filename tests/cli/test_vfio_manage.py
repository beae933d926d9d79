"""`vfio-manage` with the exit codes of NVIDIA's program."""

from pathlib import Path

import pytest

from gpuvirt.cli.main import vfio_manage
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from tests.cli.commandline import ran


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("bindd",), 1),
        (("bind", "--no-such-option"), 1),
        (("bind",), 1),
        (("unbind", "--all", "--device-id", "0000:65:00.0"), 1),
    ],
)
def test_wrong_usage_exits_with_1_as_every_failure(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    done = ran(*arguments, environment={"HOST_ROOT": str(tmp_path)}, program=vfio_manage)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_gpus_of_other_vendors_are_left_alone(tmp_path: Path) -> None:
    export(build_host(load_host("2xW7900")), tmp_path)
    done = ran("bind", "--all", environment={"HOST_ROOT": str(tmp_path)}, program=vfio_manage)
    assert (done.returncode, "0000:" in done.stdout) == (0, False)
