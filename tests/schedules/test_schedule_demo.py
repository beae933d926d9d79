"""The demo of a schedule plays a whole day: pods follow their workers, and so do the units that are free."""

import re

from tests.cli.commandline import ran

DAY, NIGHT = [f"worker-{number}" for number in (1, 2, 3, 4)], ["worker-5"]


def test_the_demo_plays_a_day() -> None:
    done = ran("demo", "--schedule")
    assert (done.returncode, done.stderr) == (0, "")
    before, plan, evening, morning = re.split(r"\n\d\. ", done.stdout)[1:]
    for chapter, app, workers, others in (
        (before, "train", DAY, NIGHT),
        (evening, "render", NIGHT, DAY),
        (morning, "train", DAY, NIGHT),
    ):
        assert sorted(re.findall(rf"pod {app}-\d+, .*: Running on (\S+)", chapter)) == workers
        assert set(re.findall(r"no unit is free: (\S+) is suspended until", chapter)) == set(others)
        assert "0 of 2000 units are free" in chapter
    assert re.findall(r"(\S+) +(?:suspend|start) ", plan) == [*DAY, *NIGHT]
    suspended = evening.index("asks the hypervisor: suspend VM worker-4")
    assert evening.index("evicts pod default/train-4") < suspended
    assert suspended < evening.index("asks the hypervisor: start VM worker-5")
    assert "Pending; worker worker-1 is suspended until Tue 2026-01-06 07:00 CET by schedule gpus" in evening
