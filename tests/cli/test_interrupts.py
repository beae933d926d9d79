"""Ctrl-C ends a command at any moment without a traceback, also while its modules still load."""

import signal
import subprocess
import sys

import pytest

PAUSES_S = (0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)
"""From the start to the interrupt: most are within the time in which modules load."""


@pytest.mark.parametrize("command", ["devices", "sim hosts", "status", "vgpu types", "controller", "demo"])
@pytest.mark.parametrize("pause_s", PAUSES_S)
def test_an_interrupt_leaves_no_traceback(command: str, pause_s: float) -> None:
    waits = f"import sys; sys.argv = ['gpuvirt', *{command.split()!r}]"
    program = [sys.executable, "-c", f"{waits}; from gpuvirt.cli.entry import gpuvirt; print(flush=True); gpuvirt()"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(pause_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    assert process.returncode in {0, 1, 2, 130, -signal.SIGINT}


def test_an_interrupt_while_the_options_of_a_command_are_read_leaves_no_traceback() -> None:
    interrupts = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    interrupts += "; typer.main.get_params_from_function = lambda _: os.kill(os.getpid(), signal.SIGINT)"
    runs = "import sys; sys.argv = ['gpuvirt', 'controller']; from gpuvirt.cli.entry import gpuvirt; gpuvirt()"
    done = subprocess.run(
        [sys.executable, "-c", f"import os, signal, typer; {interrupts}; {runs}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("words", ["controller", "version", "version --wrong"])
def test_an_interrupt_while_the_process_ends_leaves_no_traceback(words: str) -> None:
    ends = "import atexit, os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    ends += "; atexit.register(time.sleep, 60)"
    interrupts = "atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    runs = f"import sys; sys.argv = ['gpuvirt', *{words.split()!r}]; from gpuvirt.cli.entry import gpuvirt; gpuvirt()"
    done = subprocess.run(
        [sys.executable, "-c", f"{ends}; {interrupts}; {runs}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == -signal.SIGINT
