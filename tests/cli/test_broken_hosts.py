"""Broken hosts, as a person on call sees them: the cause comes first, on one screen, and the commands of fixes work."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Code
from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.cli.brokenhosts import (
    BESIDE_NIC,
    BESIDE_NIC_ON_NVIDIA,
    CONSOLE,
    CONSOLE_ON_NVIDIA,
    DISPLAY,
    FELL_OFF,
    FLEX,
    FULL,
    GRACE,
    GRACE_ON_NVIDIA,
    IN_BAD_SLOT,
    M60,
    NO_DRIVER,
    NOUVEAU,
    OLD_DRIVER,
    T4,
    WITH_VFS,
)
from tests.cli.commandline import PATH, ran
from tests.diagnosis.doctor import sickhost
from tests.diagnosis.doctor.badhosts import BAD


def of(text: str) -> Callable[[], SimKernel]:
    return lambda: sickhost.simulated(f"about: a host\n{text}")


def simulated(name: str) -> Callable[[], SimKernel]:
    return lambda: build_host(load_host(name))


BROKEN: Mapping[str, tuple[Callable[[], SimKernel], Code | None]] = {
    # An exported folder has no processes.
    **{name: (bad.build, bad.code) for name, bad in BAD.items() if bad.code is not FindingCode.CPUS_ON_OTHER_NODE},
    "a NIC in the group": (of(BESIDE_NIC), ReasonCode.GROUP_NOT_VIABLE),
    "a NIC in the group, and nvidia": (of(BESIDE_NIC_ON_NVIDIA), FindingCode.SHARED_GROUP),
    "a console on vfio-pci": (of(CONSOLE), ReasonCode.BOOT_CONSOLE),
    "a console on nvidia": (of(CONSOLE_ON_NVIDIA), None),
    "a card in display mode": (of(DISPLAY), ReasonCode.NO_VGPU_HOST),
    "an MI300X fell off": (of(FELL_OFF), ReasonCode.FELL_OFF_BUS),
    "a Grace GPU on vfio-pci": (of(GRACE), ReasonCode.GRACE_DRIVER_MISSING),
    "a Grace GPU on nvidia": (of(GRACE_ON_NVIDIA), ReasonCode.GRACE_DRIVER_MISSING),
    "an M60 without a driver": (of(M60), ReasonCode.NO_DRIVER),
    "an A10 on nouveau": (of(NOUVEAU), FindingCode.DRIVERS_FIGHT),
    "types that an old driver lacks": (of(OLD_DRIVER), ReasonCode.NO_VGPUS),
    "VFs of Intel's": (of(FLEX), ReasonCode.VFS_ENABLED),
    "an L40S filled by hand": (of(FULL), ReasonCode.UNREAD),
    "a slot behind VMD": (of(IN_BAD_SLOT), ReasonCode.ADDRESS_NOT_ACCEPTED),
    "an A10 without a driver": (of(NO_DRIVER), ReasonCode.NO_DRIVER),
    "VFs without vGPUs": (of(WITH_VFS), ReasonCode.NO_VGPUS),
    **{
        f"simulated {name}": (simulated(name), code)
        for name, code in {
            "2xA10-no-iommu": FindingCode.IOMMU_OFF,
            "2xA10-sriov": ReasonCode.NO_VGPUS,
            "2xA10-vgpu": FindingCode.VFS_OFF,
            "2xA30": FindingCode.VFS_OFF,
            "2xFlex170": ReasonCode.VFS_ENABLED,
            "2xRTX4090-one-group": FindingCode.SHARED_GROUP,
            "2xW7900": None,
            "4xL40S": ReasonCode.NO_VGPUS,
            "4xT4": ReasonCode.NO_VGPUS,
            "8xA100": ReasonCode.NO_VGPUS,
            "8xH100": ReasonCode.NO_VGPUS,
            "vm-2xV100": FindingCode.IOMMU_OFF,
        }.items()
    },
}
"""Hosts, and the code of the cause; None where all is as a user may want it, but no VM gets a GPU."""
WIDE, SCREEN = {"COLUMNS": "500"}, {"COLUMNS": "80", "LINES": "24"}
COMMAND = re.compile(
    r"(?:^|; |: |, or |fix: +)(gpuvirt (?:vfio|vgpu) (?:bind|unbind|create|apply)[^,;\n]*)", re.MULTILINE
)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands in fixes that can be run at once; what follows `then` needs a reboot, and TYPE a choice."""
    for command in dict.fromkeys(COMMAND.findall(text)):
        if "TYPE" not in command:
            yield shlex.split(command)[1:]


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_is_on_the_first_line_and_the_advised_commands_are_accepted(name: str, tmp_path: Path) -> None:
    build, code = BROKEN[name]
    export(build(), tmp_path / "host")
    sriov_manage = tmp_path / "host/usr/lib/nvidia/sriov-manage"  # a dry run asks for it, and does not run it
    sriov_manage.parent.mkdir(parents=True)
    sriov_manage.touch(0o755)
    host = {"GPUVIRT_HOST_ROOT": str(tmp_path / "host")}
    doctor = ran("doctor", environment=host | WIDE)
    assert (str(code) if code is not None else "All checks are ok") in doctor.stdout.splitlines()[0]
    screen = ran("doctor", environment=host | SCREEN).stdout
    assert len(screen.splitlines()) < 24
    codes_shown = re.findall(r"^  \w+ +(\w+): ", screen, re.MULTILINE)
    listed = doctor.stdout.splitlines()[0].partition(": ")[2] if code is not None else ""
    assert listed == ", ".join(dict.fromkeys(codes_shown)), "the most harmful first"
    devices = ran("devices", environment=host | WIDE)
    assert devices.returncode == 0
    view = json.loads(ran("devices", "-o", "json", environment=host).stdout)
    shown = doctor.stdout + devices.stdout
    for gpu in view["gpus"]:
        (row,) = (line for line in devices.stdout.splitlines() if line.startswith(gpu["address"]))
        codes = [reason["code"] for reason in gpu["reasons"]]
        assert all(found in row for found in codes if found != ReasonCode.CARRIES_VGPUS)
        why = ran("why", gpu["address"], environment=host | WIDE)
        first = why.stdout.splitlines()[0]
        if code in codes:
            assert first.endswith(f": blocked by {code}")
        assert (": blocked by " in first) is (why.returncode == 1)
        shown += why.stdout
    for words in commands(shown):
        done = ran(*words, "--dry-run", environment=host | WIDE)
        if code in {ReasonCode.VFIO_MISSING, ReasonCode.VFIO_BLOCKED} and words[:2] == ["vfio", "bind"]:
            assert str(code) in done.stdout, "it is refused for the reason that doctor gives first"
            continue
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"


@pytest.mark.ring("mount")
@pytest.mark.parametrize(
    ("text", "command", "code"),
    [
        (BESIDE_NIC, "gpuvirt vfio bind 0000:65:00.0 --also 0000:66:00.0", ReasonCode.GROUP_NOT_VIABLE),
        (BESIDE_NIC_ON_NVIDIA, "gpuvirt vfio bind 0000:65:00.0 --also 0000:66:00.0", ReasonCode.NATIVE_DRIVER),
        (NO_DRIVER, "gpuvirt vfio bind 0000:65:00.0", ReasonCode.NO_DRIVER),
        (NO_DRIVER, "gpuvirt vfio unbind 0000:65:00.0", ReasonCode.NO_DRIVER),
        (FLEX, "gpuvirt vfio bind --remove-vgpus 0000:46:00.0", ReasonCode.VFS_ENABLED),
        (FLEX, "gpuvirt vfio bind 0000:43:00.0", ReasonCode.NATIVE_DRIVER),
        (T4, "gpuvirt vgpu create 0000:86:00.0 T4-16Q", ReasonCode.NO_VGPUS),
        (T4, "gpuvirt vfio bind 0000:86:00.0", ReasonCode.NO_VGPUS),
        (WITH_VFS, "gpuvirt vfio bind --remove-vgpus 0000:65:00.0", ReasonCode.NO_VGPUS),
        ("2xA10-vgpu", "gpuvirt vgpu create 0000:b1:00.0 A10-24Q", FindingCode.VFS_OFF),
        ("4xL40S", "gpuvirt vgpu create 0000:da:00.0 L40S-12Q", ReasonCode.NO_VGPUS),
    ],
)
def test_an_advised_command_mends_the_host(text: str, command: str, code: Code, tmp_path: Path) -> None:
    host, address = text, re.findall(r"0000:\S+", command)[0]
    if ":" in text:
        host = str(tmp_path / "host.yaml")
        Path(host).write_text(f"about: a host\n{text}")
    script = f"look() {{ gpuvirt doctor --all || true; }}; look; echo =; {command} >&2; look"
    run = [sys.executable, "-m", "gpuvirt", "sim", "run", "-H", host, "--", "sh", "-ec", script]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{PATH}"}  # noqa: TID251  handed on
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("\n=\n")
    assert command in before
    subject = f"{code}: {address} "
    assert (subject in before, subject in after) == (True, False)
