"""`make test-rings` says before it begins what it starts and how long that takes, and what it skips."""

from dataclasses import replace

import pytest

from tests import rings


def test_each_ring_is_started_or_skipped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount, kernel = rings.RINGS["mount"], rings.RINGS["kernel"]
    found = {"mount": replace(mount, missing=lambda: None), "kernel": replace(kernel, missing=lambda: "not root")}
    monkeypatch.setattr(rings, "RINGS", found)
    rings.main()
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == f"starts:  {mount.what}, {mount.minutes} min"
    assert second == f"skipped: {kernel.what}: not root; to run it: {kernel.enable}"
