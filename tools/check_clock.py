"""Finds who reads the wall clock, or compares its times: only what stands below may, with the reason.

The wall clock steps: by NTP, by an administrator, after a suspended VM. Decisions use monotonic times.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from shipped import modules

ALLOWED: Mapping[str, str] = {
    "logs.py": "lines of the log",
    "agent/process.py": "when the agent started, for people",
    "gpuvirt_schedules/commands/schedulequestions.py": "the time of day decides the phase of a schedule",
    "archive.py": "times in the archive, for people",
    "cli/podaccount.py": "the time of new entries of the ledger, for people",
    "gpuvirt_schedules/commands/schedulerender.py": "times of switches, for people",
    "clock.py": "has the wall clock",
    "kube/access/execplugin.py": "the end of a credential; after a step it is asked for again, or refused once",
    "agent/cluster/gpunode.py": "times in the GpuNode's status and in events, for people",
    "agent/cluster/podshares.py": "times of events, for people",
    "agent/cluster/vgputypes.py": "times of events, for people",
    "kube/election.py": "times in the Lease, for people; who leads follows from monotonic times",
    "kube/events.py": "times of events, for people",
    "controller/nodes/resolve.py": "the time of day decides the phase of a schedule",
    "controller/schedulespart.py": "the time of day decides the phase of a schedule",
    "gpuvirt_schedules/controller/configurednodes.py": "times of conditions, for people",
    "gpuvirt_schedules/controller/keeper.py": "the time of day decides the phase; times of conditions, for people",
    "gpuvirt_schedules/controller/objects.py": "times in the status; the time of day decides the phase of a schedule",
    "gpuvirt_schedules/controller/scheduleapi.py": "times of conditions, for people",
    "gpuvirt_schedules/controller/schedulemetrics.py": "how long steps took, in metrics for people",
    "gpuvirt_schedules/controller/rounds.py": "the time of day decides the phase of a schedule",
    "shares/awayworkers.py": "when a worker comes back, for people",
    "controller/webhookcertificate/keeper.py": "times of certificates; a step of the clock issues one early or late",
    "controller/webhookcertificate/signing.py": "the times of certificates; they are valid for months",
    "controller/announcer.py": "times of events, for people",
    "controller/controller.py": "times of statuses, and of the history of reverts",
    "controller/decisions.py": "times of statuses, and of the history of reverts",
    "controller/kubevirt/decisions.py": "the times of the history of reverts",
    "controller/kubevirt/changes.py": "reverts of the last day, kept in the cluster: an hour does not matter",
    "controller/kubevirt/planning.py": "the times of the history of reverts",
    "controller/policy/status.py": "times of conditions, for people",
    "agent/kubelet/accountwatch.py": "the time of new entries of the ledger, for people",
    "agent/kubelet/checkpoint.py": "compares the times of two files of the kubelet; a wrong order keeps allocations",
    "model/allocation/ledger.py": "the times of entries, for people",
    "gpuvirt_schedules/decide/workers.py": "the clock of a resumed guest is compared with the controller's",
    "gpuvirt_schedules/decide/times.py": "the times of an override, which are times of day",
    "gpuvirt_schedules/decide/faults.py": "the time of day decides the phase of a schedule",
    "gpuvirt_schedules/decide/forecast.py": "the time of day decides the phase of a schedule",
    "gpuvirt_schedules/decide/history.py": "times of switches, for people",
    "gpuvirt_schedules/decide/nextstep.py": "deadlines in the status, for other controllers; a step delays or holds",
    "gpuvirt_schedules/decide/reports.py": "times in the status, for people",
    "gpuvirt_schedules/decide/vmstops.py": "deadlines in the status, which other controllers go on with",
    "model/workers/observed.py": "the clock of a resumed guest; deadlines in the status, for other controllers",
    "model/workers/spec.py": "the time of day decides the phase of a schedule",
    "model/workers/status.py": "deadlines in the status, which other controllers go on with",
    "gpuvirt_schedules/decide/transition.py": "deadlines in the status, for other controllers; a step delays or holds",
    "model/node/decisions.py": "the time of the view, for people",
    "model/offers/deviceusers.py": "the time of allocations that have none, which nobody shows",
    "model/offers/view.py": "the times of the view, for people",
    "model/offers/viewmaking.py": "the time of the view, for people",
    "agent/agent.py": "the time of the view, for people",
    "agent/allocation/allocator.py": "the time of new entries of the ledger, for people",
    "agent/ondemand/ondemandallocator.py": "the time of new entries of the ledger, for people",
    "agent/known/snapshot.py": "the time of the view, for people",
    "agent/known/state.py": "the time of the view, for people",
    "agent/published.py": "the time of the view, for people",
    "cli/support/packing.py": "the time of the archive, for people",
    "cli/support/sections.py": "the time of the archive, for people",
}
TIMES = frozenset({"datetime", "timedelta", "time", "time_ns", "st_mtime", "st_mtime_ns", "st_ctime", "timestamp"})
IDENTITY = frozenset(
    {
        "agent/kubelet/recordedallocations.py",
        "agent/change/gate/gatefiles.py",
        "agent/shares/sharefiles.py",
        "agent/store/persisted.py",
        "web/certificates.py",
    }
)
"""Modules that compare a file's time with itself, to find that it was replaced."""


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield where a module reads the wall clock or names a time of it."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(clock, "now"), [], []) if "clock" in ast.unparse(clock).lower():
                yield node.lineno, f"{ast.unparse(clock)}.now()"
            case ast.ImportFrom("datetime" | "time", names):
                yield from ((node.lineno, name.name) for name in names if name.name in TIMES)
            case ast.Attribute(_, name) if name in TIMES and not isinstance(node.ctx, ast.Store):
                yield node.lineno, name
            case _:
                pass


def find_faults(sources: Iterable[tuple[str, Path]], allowed: Mapping[str, str]) -> list[str]:
    """Return the places that may not read the wall clock, and the modules that may although they do not."""
    faults, users = [], set[str]()
    for name, path in sources:
        if name in IDENTITY:
            continue
        uses = list(_uses(ast.parse(path.read_text())))
        if uses:
            users.add(name)
        if name not in allowed:
            faults += [f"{name}:{line}: {what} is a time of the wall clock, which steps" for line, what in uses]
    return faults + [f"{name}: does not read the wall clock" for name in sorted(allowed.keys() - users)]


def main() -> int:
    """Check the packages, or those of other folders."""
    others = [Path(folder) for folder in sys.argv[1:]]
    faults = find_faults(modules(*others), {} if others else ALLOWED)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
