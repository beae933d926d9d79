"""`make soak`: runs random tests with new seeds for a number of seconds, and prints the lines that repeat failures."""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random, SystemRandom
from threading import Lock
from time import monotonic  # noqa: TID251  how long a person lets it run

from tests.soak.pieces import MOST, Piece, found_files, pieces


def soak(seconds: float, jobs: int, seed: int) -> int:
    """Run pieces side by side until the time is over; return 1 if one has failed."""
    end_s, lock = monotonic() + seconds, Lock()
    to_run, failed, runs = pieces(found_files(), Random(seed)), list[Piece](), list[Piece]()

    def work() -> None:
        while monotonic() < end_s:
            with lock:
                piece = next(to_run)
            problem = problem_of(piece)
            with lock:
                runs.append(piece)
                if problem:
                    failed.append(piece)
                    print(f"{problem}\nfailed: {piece.line}\n", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    print(f"{len(runs)} runs of random tests (--seed {seed}), {len(failed)} failed")
    for piece in failed:
        print(f"    {piece.line}")
    return 1 if failed else 0


def problem_of(piece: Piece) -> str:
    """Run a piece; return what it has printed if it has failed, else an empty text."""
    # With CI=true, hypothesis takes fixed seeds.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # noqa: TID251  the children's
    done = subprocess.run(piece.command, capture_output=True, text=True, check=False, env=environment)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="begun runs end later")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--seed", type=int, help="which runs come, in which order, with which seeds (a new one)")
    options = parser.parse_args()
    return soak(
        options.seconds, options.jobs, options.seed if options.seed is not None else SystemRandom().randrange(MOST)
    )


if __name__ == "__main__":
    sys.exit(main())
