"""Checks of isolation: the IOMMU, its kernel arguments, interrupt remapping, and groups that GPUs share."""

import re
from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.diagnosis.bootloader import drop_arguments, set_arguments
from gpuvirt.diagnosis.checks.firmware import is_amd, is_vm, is_x86
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, fine, problem, seen, unread
from gpuvirt.facts.ids import slot_of
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.platform import Attribute, Listing
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.reasons import FindingCode, Seen, count_of
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath

TABLES = {"DMAR": "VT-d", "IVRS": "AMD-Vi", "IORT": "SMMU"}
"""The ACPI tables that describe an IOMMU, and the name of that IOMMU."""

ECAP_INTERRUPT_REMAPPING = 1 << 3
"""ECAP.IR (Intel VT-d specification, 11.4.3)."""

ARGUMENTS = ("intel_iommu", "amd_iommu", "iommu")
OFF = (("intel_iommu", "off"), ("amd_iommu", "off"), ("iommu", "off"), ("intremap", "off"))


def iommu(evidence: Evidence) -> Iterator[Finding]:
    """The IOMMU is on."""
    if evidence.serves_containers_only:
        yield fine("the IOMMU", "is not needed: all GPUs are for containers")
        return
    setup = evidence.setup
    groups, tables = setup.iommu_groups, setup.acpi_tables
    known = [name for prefix, name in TABLES.items() if any(table.startswith(prefix) for table in tables.known)]
    if isinstance(groups.names, Unread) or (groups.names is None and setup.modules.names is None):
        yield unread("the IOMMU", "may be on or off: the IOMMU groups could not be read", groups)
    elif groups.known:
        kind = known[0] if known else "the IOMMU"
        shown = Listing(groups.path, (count_of(len(groups.known), "group"),))
        yield fine(kind, f"is on, with {count_of(len(groups.known), 'IOMMU group')}", shown, setup.iommus)
    elif isinstance(tables.names, Unread):
        yield _off(evidence, "is off", ("in the firmware's setup: enable VT-d or AMD-Vi", *_switch_on(evidence)))
    elif not known:
        yield _off(
            evidence,
            "is off in the firmware: no ACPI table describes one",
            (_firmware_fix(evidence), *_arguments(evidence)),
        )
    elif evidence.setup.argument("intel_iommu") == "off" or evidence.setup.argument("amd_iommu") == "off":
        yield _off(evidence, "is disabled by the kernel's command line", _switch_on(evidence))
    elif known[0] == "VT-d" and evidence.setup.argument("intel_iommu") is None:
        yield _off(evidence, "exists, but this kernel uses it only with intel_iommu=on", _switch_on(evidence))
    else:
        yield _off(
            evidence,
            "exists, but the kernel has not enabled it",
            ("dmesg | grep -i -e DMAR -e AMD-Vi -e iommu", *_switch_on(evidence)),
        )


def _off(evidence: Evidence, what: str, fix: tuple[str, ...]) -> Finding:
    setup = evidence.setup
    words = [word for word in evidence.setup.arguments if word.partition("=")[0] in ARGUMENTS]
    cmdline = Attribute(setup.cmdline.path, " ".join(words) or f"none of {', '.join(ARGUMENTS)}")
    return problem(
        FindingCode.IOMMU_OFF,
        "the IOMMU",
        what,
        seen(setup.iommu_groups, setup.acpi_tables, cmdline if setup.cmdline.text else setup.cmdline),
        why="without it no GPU can be isolated, and vfio-pci binds none (each GPU has the reason NoIommuGroup)",
        fix=fix,
    )


def _firmware_fix(evidence: Evidence) -> str:
    if is_vm(evidence):
        return "on the outer host: give this VM a virtual IOMMU (see HostIsVm)"
    name = "AMD-Vi / IOMMU" if is_amd(evidence) else "Intel VT for Directed I/O (VT-d)"
    return f"in the firmware's setup: enable {name}" if is_x86(evidence) else "in the firmware's setup: enable the SMMU"


def _arguments(evidence: Evidence) -> tuple[str, ...]:
    """Return the steps for the kernel once the firmware's IOMMU is on: Intel's needs intel_iommu=on."""
    intel = is_x86(evidence) and not is_amd(evidence)
    return _switch_on(evidence) if intel and evidence.setup.argument("intel_iommu") != "on" else ()


def _switch_on(evidence: Evidence) -> tuple[str, ...]:
    setup = evidence.setup
    off = [f"{name}={value}" for name, value in OFF if evidence.setup.argument(name) == value]
    if off and is_amd(evidence):
        return drop_arguments(setup, *off)
    return (*(drop_arguments(setup, *off)[:-1] if off else ()), *set_arguments(setup, "intel_iommu=on", "iommu=pt"))


def kernel_arguments(evidence: Evidence) -> Iterator[Finding]:
    """No argument of the kernel prevents passthrough or weakens isolation."""
    setup, cmdline = evidence.setup, evidence.setup.cmdline
    if isinstance(cmdline.value, Unread) or cmdline.value is None:
        yield unread("the kernel's command line", "could not be read", cmdline)
        return
    given = [name for name in ARGUMENTS if evidence.setup.argument(name) is not None]
    words = " ".join(f"{name}={evidence.setup.argument(name)}" for name in given)
    shown = Attribute(cmdline.path, words or f"none of {', '.join(ARGUMENTS)}")
    if "nomodeset" in evidence.setup.arguments and any(
        gpu.function.driver in {"amdgpu", "i915", "xe", "nouveau"} for gpu in evidence.inventory.gpus.values()
    ):
        yield problem(
            FindingCode.KERNEL_ARGUMENT,
            "the kernel's command line",
            "has nomodeset",
            (Seen(cmdline.path, "nomodeset"),),
            why="with it, amdgpu, i915, xe and nouveau bind no GPU: no VFs, and no GPUs for containers",
            fix=drop_arguments(setup, "nomodeset"),
        )
    elif setup.iommu_groups.known:
        fast = evidence.setup.argument("iommu") == "pt"
        hint = "" if fast or not is_x86(evidence) else "; iommu=pt would make the host's own devices faster"
        yield fine("the kernel's command line", f"has no argument that prevents passthrough{hint}", shown)
    if override := evidence.setup.argument("pcie_acs_override"):
        yield problem(
            FindingCode.ACS_OVERRIDE,
            "the kernel's command line",
            "splits IOMMU groups that the hardware does not isolate",
            seen(Attribute(cmdline.path, f"pcie_acs_override={override}")),
            why="devices of such groups can write into each other past the IOMMU: one tenant's VM into another's",
            fix=drop_arguments(setup, f"pcie_acs_override={override}"),
        )


def interrupt_remapping(evidence: Evidence) -> Iterator[Finding]:
    """Interrupts of devices are remapped, so that a VM can't forge the host's."""
    setup = evidence.setup
    if not setup.iommu_groups.known or not is_x86(evidence):
        return
    unsafe = (setup.unsafe_interrupts.text or "").upper() == "Y"
    if unsafe:
        yield problem(
            FindingCode.UNSAFE_INTERRUPTS,
            "vfio",
            "accepts devices whose interrupts are not isolated",
            seen(setup.unsafe_interrupts),
            why="a VM can raise any interrupt on the host through its device",
            fix=("remove allow_unsafe_interrupts=1 from /etc/modprobe.d and from the kernel's command line", "reboot"),
        )
    chips = setup.irq_chips if isinstance(setup.irq_chips, tuple) else ()
    remapping = next((chip for chip in chips if chip.text and chip.text.startswith("IR-")), None)
    if remapping is not None:
        yield fine("interrupts", "are remapped", remapping)
    elif any(chip.text for chip in chips):
        yield _not_remapped(evidence, next(chip for chip in chips if chip.text), unsafe=unsafe)
    else:
        unread_chips = evidence.setup.irq_chips
        source = Attribute(HostPath("/sys/kernel/irq"), unread_chips if isinstance(unread_chips, Unread) else None)
        yield unread("interrupts", "may or may not be remapped: no file shows it", source, *evidence.setup.ecaps)


def _not_remapped(evidence: Evidence, chip: Attribute, *, unsafe: bool) -> Finding:
    setup = evidence.setup
    off = [word for word in ("intremap=off", "nointremap", "intremap=nosid") if word in evidence.setup.arguments]
    remaps = [can_remap(ecap.text or "") for ecap in setup.ecaps]
    if off:
        fix = drop_arguments(setup, *off)
    elif remaps and not any(remaps):
        fix = ("this IOMMU can't remap interrupts; use another host for VMs that you don't trust",)
    else:
        fix = ("in the firmware's setup: enable interrupt remapping, and x2APIC where it is a setting", "reboot")
    return problem(
        FindingCode.INTERRUPTS_NOT_REMAPPED,
        "interrupts",
        "are not remapped",
        (
            *seen(chip, *(replace(ecap, value=_in_words(ecap)) for ecap in setup.ecaps)),
            Seen(setup.cmdline.path, " ".join(off) or "does not disable it"),
        ),
        why="vfio then refuses devices (EPERM when a VM starts), since the VM could forge the host's interrupts",
        fix=fix,
        level=Level.WARNING if unsafe else Level.ERROR,
    )


def _in_words(ecap: Attribute) -> str | Unread | None:
    remaps = can_remap(ecap.text or "")
    return ecap.value if remaps is None else f"{ecap.text} (bit 3, interrupt remapping, is {int(remaps)})"


def can_remap(ecap: str) -> bool | None:
    """Return whether an Intel IOMMU can remap interrupts, by its extended capabilities; None if they are malformed."""
    if not re.fullmatch(r"(?:0x)?[0-9a-fA-F]{1,16}", ecap):
        return None
    return bool(int(ecap, 16) & ECAP_INTERRUPT_REMAPPING)


def shared_groups(evidence: Evidence) -> Iterator[Finding]:
    """No GPU shares its IOMMU group with a device of another slot."""
    done: set[int] = set()
    gpus = evidence.inventory.gpus
    for gpu in gpus.values():
        group = gpu.function.iommu_group
        if not isinstance(group, int) or group in done:
            continue
        foreign = _foreign_functions(evidence, gpu)
        if gpu.function.on_vfio and any(_may_be_hosts(function) for function in foreign):
            done.add(group)  # no VM can open the group at all; the check group_viability reports that
        elif foreign:
            done.add(group)
            yield _shared(evidence, gpu, group, foreign)
    alone = sum(isinstance(gpu.function.iommu_group, int) for gpu in gpus.values())
    if alone and not done:
        yield fine(count_of(alone, "GPU"), "in IOMMU groups with only functions of their own card")


def _foreign_functions(evidence: Evidence, gpu: Gpu) -> tuple[PciFunction, ...]:
    group = gpu.function.iommu_group
    members = evidence.inventory.groups.get(group, ()) if isinstance(group, int) else ()
    found = (evidence.inventory.facts.functions[address] for address in members)
    slot = slot_of(gpu.function.address)
    return tuple(
        function for function in found if slot_of(function.address) != slot and function.kind is not FunctionKind.BRIDGE
    )


def _shared(evidence: Evidence, gpu: Gpu, group: int, foreign: tuple[PciFunction, ...]) -> Finding:
    named = ", ".join(
        f"{function.address} ({function.kind}, {function.id}, {_driver(function)})" for function in foreign
    )
    functions = evidence.inventory.facts.functions
    members = [address for address, function in functions.items() if function.iommu_group == group]
    return problem(
        FindingCode.SHARED_GROUP,
        gpu.function.address,
        f"shares IOMMU group {group} with {named}",
        seen(Listing(HostPath(f"/sys/kernel/iommu_groups/{group}/devices"), tuple(sorted(members)))),
        why="one VM gets all of a group or none of it; the bridge above does not isolate its devices (no ACS)",
        fix=(
            "move the card to a slot below another root port, or enable ACS (and ARI) in the firmware's setup",
            *(
                ()
                if any(_may_be_hosts(function) for function in foreign)
                else ("or leave it as it is: one VM gets the whole group",)
            ),
        ),
    )


def _may_be_hosts(function: PciFunction) -> bool:
    """Return whether the host may need a function: it is not part of a GPU's card, and has a host driver."""
    unknown = isinstance(function.driver, Unread)
    return function.kind is FunctionKind.OTHER and (unknown or function.spoils_group)


def _driver(function: PciFunction) -> str:
    return function.driver if isinstance(function.driver, str) else "no driver" if function.driver is None else "?"
