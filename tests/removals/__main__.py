"""`make removals`: removes each guard in turn, and finds the test that notices.

The first run records which tests execute each guard, in `.removals`. `killers.json` has the test that noticed each
removal last: it is tried first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random

from tests.removals.guards import CHILD_RINGS, Removal, removals, ring_of
from tests.removals.reach import OPTION
from tests.removals.trial import CPU, MOST_CPU_S, RESULTS, TRIALS, Trial, read_results, write_trials
from tests.removals.unnoticed import UNNOTICED
from tests.rings import RINGS

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".removals"
KILLERS = Path(__file__).with_name("killers.json")
FOLDERS = ("agent", "cli", "explore/test_exploration.py", "hardware", "mount", "schedules")
"""The tests that may notice a removal."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider")
MOST_TESTS = 40
"""How many tests are tried for one removal."""

BATCH = 100
"""How many trials one process makes, which collects their tests once."""

Reach = Mapping[str, Sequence[str]]
"""The tests that execute each guard, by the key of its removal; the fastest first."""


def read_killers() -> dict[str, str]:
    """Return the test that noticed each removal last."""
    found: dict[str, str] = json.loads(KILLERS.read_text())
    return found


def write_killers(killers: Mapping[str, str]) -> None:
    """Record the test that noticed each removal."""
    KILLERS.write_text(json.dumps(dict(sorted(killers.items())), indent=1, ensure_ascii=False) + "\n")


def record_reach(jobs: int) -> None:
    """Run all tests, and record which execute each guard."""
    tests = [f"tests/{folder}" for folder in FOLDERS]
    parallel = ("-n", str(jobs)) if jobs > 1 else ()
    command = (*PYTEST, "-m", "not ring", *parallel, "-p", "tests.removals.reach", OPTION, str(CACHE), *tests)
    subprocess.run(command, cwd=ROOT, check=False)


def read_reach(folder: Path = CACHE) -> Reach:
    """Return the recorded tests of each guard."""
    found: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        for test, (duration_s, keys) in json.loads(path.read_text()).items():
            for key in keys:
                found[key].append((duration_s, test))
    return {key: [test for _, test in sorted(tests)] for key, tests in found.items()}


def by_reach(removal: Removal, reach: Reach, killer: str | None, most: int = MOST_TESTS) -> Trial:
    """Return the trial of a removal: the test that noticed it last, then the fastest of each file in turn."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in reach.get(removal.key, ()):
        files[_file(test)].append(test)
    in_turn = (test for tests in zip_longest(*files.values()) for test in tests if test is not None)
    first = (killer,) if killer is not None else ()
    return Trial(removal.key, tuple(dict.fromkeys((*first, *in_turn)))[:most])


def by_killers(key: str, killers: Mapping[str, str], most: int = MOST_TESTS) -> Trial:
    """Return the trial of a removal without a recorded reach: the tests that notice removals near it, nearest first.

    Near are those of the same function, module and package. Removals count whose statements have changed since.
    """
    module, function, _ = key.split(": ", 2)

    def distance(other: str) -> int:
        other_module, other_function, _ = other.split(": ", 2)
        if other_module != module:
            return 3
        return 0 if other == key else 1 if other_function == function else 2

    package = module.rpartition(".")[0]
    near = sorted((other for other in killers if other.startswith(package)), key=distance)
    return Trial(key, tuple(dict.fromkeys(killers[other] for other in near))[:most])


def make(trials: Sequence[Trial], *, most_cpu_s: int = MOST_CPU_S) -> dict[str, str]:
    """Make trials in one process that collects their tests; return the test that notices each removal, or ""."""
    files = sorted({_file(test) for trial in trials for test in trial.tests if (ROOT / _file(test)).exists()})
    if not files:
        return {trial.key: "" for trial in trials}
    with tempfile.TemporaryDirectory() as folder:
        asked, results = Path(folder) / "trials.json", Path(folder) / "results.json"
        write_trials(asked, trials)
        limits = (TRIALS, str(asked), RESULTS, str(results), CPU, str(most_cpu_s))
        command = (*PYTEST, "-p", "tests.removals.trial", *limits, *files)
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        found = read_results(results) if results.exists() else {}
        if found.keys() != {trial.key for trial in trials}:
            raise RuntimeError(f"the trials have stopped:\n{done.stdout}\n{done.stderr}")
    return found


def sample(number: int, seed: str, killers: Mapping[str, str]) -> list[str]:
    """Return the keys of removals: first those that no test is known to notice, then others at random.

    Those that are listed as unnoticed are left out.
    """
    guards = sorted(removals().keys() - UNNOTICED.keys())
    return sorted(Random(seed).sample(guards, len(guards)), key=lambda guard: guard in killers)[:number]


def _file(test: str) -> str:
    return test.partition("::")[0]


def _report(found: Mapping[str, str], killers: Mapping[str, str]) -> int:
    """Print the removals that no test notices, and the lines that are outdated; return 1 if there are any."""
    survivors = [key for key, test in found.items() if not test and key not in UNNOTICED]
    noticed = [key for key, test in found.items() if test and key in UNNOTICED]
    print(*(f"NOT NOTICED  {key}" for key in survivors), sep="\n")
    print(*(f"noticed by {found[key]}, take it from unnoticed.py: {key}" for key in noticed), sep="\n")
    by_test = len({test for test in killers.values() if test})
    print(f"{len(found)} removals: {len(survivors)} not noticed, {len(UNNOTICED)} listed; {by_test} tests notice them")
    return 1 if survivors or noticed else 0


def _batches(trials: Sequence[Trial], size: int) -> Iterable[Sequence[Trial]]:
    return (trials[index : index + size] for index in range(0, len(trials), size))


def main() -> int:
    """Run the command line; return 1 if a removal is not noticed."""
    parser = argparse.ArgumentParser(prog="tests.removals")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes record which tests execute each guard")
    parser.add_argument("--again", action="store_true", help="record again which tests execute each guard")
    parser.add_argument("--only-new", action="store_true", help="only removals that no known test notices")
    parser.add_argument("--list", action="store_true", help="only list the removals")
    parser.add_argument("--tests", type=int, default=MOST_TESTS, help="how many tests are tried for each, at most")
    parser.add_argument("words", nargs="*", help="only removals whose key has one of these in it")
    options = parser.parse_args()
    known, killers = removals(), read_killers()
    chosen = [each for each in known.values() if not options.words or any(word in each.key for word in options.words)]
    if options.list:
        print(*(f"{each.key}\n    {killers.get(each.key, UNNOTICED.get(each.key, '?'))}" for each in chosen), sep="\n")
        return 0
    if options.only_new:
        chosen = [each for each in chosen if each.key not in killers and each.key not in UNNOTICED]
    for ring in CHILD_RINGS:
        if (why := RINGS[ring].missing()) is not None:
            print(f"not run here: ring {ring}: {why}")
            chosen = [each for each in chosen if ring_of(each.module) != ring]
    if options.again or not CACHE.is_dir():
        record_reach(options.jobs)
    reach = read_reach()
    found: dict[str, str] = {}
    trials = [
        by_reach(each, reach, killers.get(each.key), options.tests)
        if each.key in reach
        else by_killers(each.key, killers, options.tests)
        for each in chosen
    ]
    for batch in _batches(trials, BATCH):
        found |= (new := make(batch))
        killers |= {key: test for key, test in new.items() if test}
        write_killers({key: test for key, test in killers.items() if key in known})
        print(*(f"{'noticed' if test else '-------'}  {key}" for key, test in new.items()), sep="\n", flush=True)
    return _report(found, killers)


if __name__ == "__main__":
    sys.exit(main())
