"""`vfio-manage` with the exit codes of NVIDIA's program."""

import pytest

from tests.cli.commandline import gpuvirt


@pytest.mark.parametrize(
    ("arguments", "code"), [(("--version",), 0), (("--help",), 0), (("bindd",), 1), (("bind", "--no-such-option"), 1)]
)
def test_wrong_usage_exits_with_1_as_every_failure(arguments: tuple[str, ...], code: int) -> None:
    done = gpuvirt("sim", "run", "--snapshot", "--", "vfio-manage", *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
