"""Asks nvidia-smi for the names of the vGPU types in use that no VF lists.

nvidia-smi takes about a second, opens the GPU, and may hang with the driver. A GPU is asked about once, and only if no
earlier answer has named its types.
"""

import asyncio
from collections.abc import Collection
from functools import partial

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.access.tools import PROGRAM, HostTools, Tools
from gpuvirt.hardware.programs.smireport import read_types
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError
from gpuvirt.model.inventory.inventory import build_inventory, unnamed_types
from gpuvirt.model.inventory.naming import Learn, TypeNames
from gpuvirt.paths import HostRoots

WITHIN_S = 30.0
"""The longest wait of a command that only reads the host. nvidia-smi takes some seconds on a host of many GPUs."""


def learn_names(tools: Tools, facts: Facts, known: TypeNames, gpus: Collection[PciAddress] | None = None) -> TypeNames:
    """Return the names with nvidia-smi's. It is asked about the GPUs in `gpus`, about all GPUs if `gpus` is None."""
    names = known.observing(facts)
    while (gpu := next((gpu for gpu in _to_ask(facts, names) if gpus is None or gpu in gpus), None)) is not None:
        names = names.answered(gpu, read_types(tools, gpu))
    return names


def asking(roots: HostRoots) -> Learn:
    """Return the function that asks a host's nvidia-smi, for a command that only reads the host."""
    return partial(learn_names_in_time, HostTools(roots.system, roots.run / "nvidia/driver"))


def learn_names_in_time(tools: Tools, facts: Facts, known: TypeNames) -> TypeNames:
    """Return the same names without waiting for a driver that hangs."""
    names = known.observing(facts)
    if not (asked := _to_ask(facts, names)):
        return names
    worker = ThreadWorker("nvidia-smi")
    try:
        return asyncio.run(
            worker.run(lambda: learn_names(tools, facts, names), name="name vGPU types", timeout_s=WITHIN_S)
        )
    except WorkerBlockedError:  # unknown: each of these names is Unread
        for gpu in asked:
            names = names.answered(gpu, Unread(PROGRAM, seen=f"has not ended within {WITHIN_S:g} s"))
        return names


def _to_ask(facts: Facts, names: TypeNames) -> list[PciAddress]:
    """Return the GPUs with types that have no name, for which nvidia-smi has not been asked."""
    return [gpu for gpu, found in unnamed_types(build_inventory(facts, names)).items() if not found.answer]
