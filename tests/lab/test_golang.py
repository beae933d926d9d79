"""The Go of the computer builds the lab's programs only where it is as new as their modules require."""

from pathlib import Path

import pytest
from lab.cluster.golang import installed_go


@pytest.mark.parametrize(
    ("printed", "is_new_enough"),
    [
        ("go version go1.26.8 linux/amd64", True),
        ("go version go1.26.7 linux/amd64", False),
        ("go version go1.26 linux/amd64", False),
        ("go version go1.27 linux/amd64", True),
        ("go version go1.27.3 linux/amd64", True),
        ("go version go1.27rc1 linux/amd64", True),
        ("go version devel go1.28-5a1b2c3 linux/amd64", True),
        ("no Go", False),
    ],
)
def test_a_go_that_is_too_old_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, is_new_enough: bool
) -> None:
    program = tmp_path / "go"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (installed_go() is not None) == is_new_enough
