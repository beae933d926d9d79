"""Packs a support archive: the files that a person without access to a host needs to diagnose its GPUs.

Each section collects one part, and notes the files that it could not read or left out. Only the archive is written.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gpuvirt import __version__, archive, plain
from gpuvirt.agent import published
from gpuvirt.agent.change.typenames import asking
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.kubelet import checkpoint
from gpuvirt.agent.shares import sharefiles
from gpuvirt.agent.store import agentstate, hostfiles
from gpuvirt.archive import ArchiveManifest, Entry, LeftOut, NotRead
from gpuvirt.cli.evidence import EvidenceSources, diagnose
from gpuvirt.cli.support import files
from gpuvirt.cli.support.packing import ArchiveRequest, Collected, Packing, Pseudonyms, is_absent, meaning
from gpuvirt.documents import from_json
from gpuvirt.errors import ConfigError, DamagedError
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.archives.hostcopy import LEFT_OUT, copy_host
from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import count_of
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.limits import VARIABLES
from gpuvirt.model.shares.node.nvidiacdi import VISIBLE
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.paths import HostPath

CDI = HostPath("/run/cdi")
MOST_SPECS = 200
"""The number of specs that an archive has; a node has some hundred pods."""
_NODE = re.compile(r"/dev/[A-Za-z0-9/_-]{1,100}")
_OWN = VARIABLES | {VISIBLE, sharespec.GPUS, sharespec.UNITS}


class _DeviceNode(msgspec.Struct, frozen=True):
    path: str = ""


class _Edits(msgspec.Struct, frozen=True, rename="camel"):
    env: tuple[str, ...] = ()
    device_nodes: tuple[_DeviceNode, ...] = ()


class _CdiDevice(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    annotations: dict[str, str] = {}
    container_edits: _Edits = _Edits()


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    cdi_version: str
    kind: str
    devices: tuple[_CdiDevice, ...]


def collect_shares(packing: Packing) -> Collected:
    """Return the records of shares and the CDI specs of containers; nothing on a host that never shared a GPU."""
    found: dict[str, Entry] = {}
    path = records_path(packing)
    if not is_absent(path) and (content := packing.content(path)) is not None:
        place = f"{archive.HOST}/var/lib/gpuvirt/{sharefiles.FILE}"
        found |= packing.understood(path, place, content, lambda content: _fit_records(packing.names, content))
    specs = _specs(packing)
    for path in specs[:MOST_SPECS]:
        if (content := packing.content(path)) is not None:
            place = f"{archive.HOST}{CDI}/{path.name}"
            found |= packing.understood(path, place, content, lambda content: _fit_spec(packing.names, content))
    if specs:
        what = f"{packing.asked.roots.local(CDI)}/{sharespec.PREFIX}*"
        packing.left_out.append(LeftOut(what, "mounts, hooks, and variables of other programs"))
    if len(specs) > MOST_SPECS:
        packing.left_out.append(LeftOut(str(packing.asked.roots.local(CDI)), f"all but {MOST_SPECS} specs of shares"))
    return found


def learn_pods(packing: Packing, names: Pseudonyms) -> None:
    """Learn the names of the pods with shares; a file that can't be used is noted when it is packed."""
    try:
        records = sharefiles.FORMAT.decode(records_path(packing).read_bytes()).value
    except (OSError, DamagedError):
        return
    for uid, pod in sorted(records.pods.items()):
        names.pod_record(uid, pod)


def records_path(packing: Packing) -> Path:
    """Return the file with the records of the agent whose ledger is packed."""
    ledgers = packing.asked.ledgers
    return next((path for path in ledgers if not is_absent(path)), ledgers[0]).with_name(sharefiles.FILE)


def _specs(packing: Packing) -> list[Path]:
    folder = packing.asked.roots.local(CDI)
    try:
        return sorted(path for path in folder.iterdir() if sharespec.nonce_in(path.name) is not None)
    except FileNotFoundError:
        return []
    except OSError as error:
        packing.refused(folder, error)
        return []


def _fit_records(names: Pseudonyms | None, content: bytes) -> bytes:
    records = sharefiles.FORMAT.decode(content).value
    if names is None:
        return content
    return sharefiles.FORMAT.encode(ShareRecords(dict(names.pod_record(*pod) for pod in records.pods.items())))


def _fit_spec(names: Pseudonyms | None, content: bytes) -> bytes:
    spec, owners = from_json(content, _Spec), dict(sharespec.owners(content))
    devices = tuple(
        _CdiDevice(device.name, {sharespec.RECORD: _fit_owner(names, owners[device.name])}, _fit_edits(device))
        for device in spec.devices
    )
    return msgspec.json.format(msgspec.json.encode(_Spec(spec.cdi_version, spec.kind, devices)), indent=1) + b"\n"


def _fit_owner(names: Pseudonyms | None, owner: sharespec.SpecOwner) -> str:
    if names is not None:
        uid, pod = names.pod_record(owner.uid, owner.pod)
        owner = sharespec.SpecOwner(uid, ContainerName(names.container(owner.container)), pod)
    return msgspec.json.encode(owner).decode()


def _fit_edits(device: _CdiDevice) -> _Edits:
    edits = device.container_edits
    env = tuple(variable for variable in edits.env if variable.partition("=")[0] in _OWN)
    return _Edits(env, tuple(node for node in edits.device_nodes if _NODE.fullmatch(node.path)))


LOG_BYTES = 4 << 20
"""How much of each log is packed, from its end."""
MOST_LOGS = 16
MOST_LINES = 20
UNNAMED = "host"
KUBELET = f"{archive.HOST}/var/lib/kubelet"
"""The kubelet's folder in the archive, whatever its path on the host."""


class Packed(msgspec.Struct, frozen=True):
    """A packed archive."""

    name: str
    """The name of its file, without `.tar.gz`."""
    content: bytes
    manifest: ArchiveManifest


class Section(msgspec.Struct, frozen=True):
    """A part of the archive."""

    name: str
    about: str
    collect: Callable[[Packing], Collected]


def pack(asked: ArchiveRequest) -> Packed:
    """Return the archive of a host."""
    packing = _begin(asked)
    members: dict[str, Entry] = {}
    sections: list[archive.ArchivedSection] = []
    for section in SECTIONS:
        found = section.collect(packing)
        contents = [entry for entry in found.values() if isinstance(entry, bytes)]
        sections.append(archive.ArchivedSection(section.name, section.about, len(contents), sum(map(len, contents))))
        members |= found
    if packing.names is not None:
        packing.left_out.append(
            LeftOut("names", "of the node, namespaces, pods, their UIDs and containers: replaced by pseudonyms")
        )
    node = packing.names.node if packing.names is not None else next(iter(asked.nodes), UNNAMED)
    manifest = ArchiveManifest(
        format=archive.FORMAT,
        gpuvirt=__version__,
        at=packing.at,
        node=node,
        names_hidden=asked.hide_names,
        privileged=os.geteuid() == 0,
        collected=tuple(sections),
        unread=tuple(NotRead(packing.nameless(file.path), file.errno, file.why) for file in packing.unread),
        left_out=tuple(LeftOut(packing.nameless(part.what), packing.nameless(part.why)) for part in packing.left_out),
    )
    name = f"gpuvirt-support-{_fit_for_files(node)}-{packing.at:%Y%m%dT%H%M%SZ}"
    return Packed(name, archive.pack(name, manifest, members), manifest)


def _begin(asked: ArchiveRequest) -> Packing:
    """Observe the host as `gpuvirt devices` does, and learn the names to hide."""
    ledger = snapshot.read_ledger(*asked.ledgers)
    facts = with_users(asked.kernel, scan(asked.kernel))
    types = asking(asked.roots)(facts, ledger.names)
    view = snapshot.view_of(facts, asked.settings, asked.ids, asked.clock, ledger, types)
    names = Pseudonyms(asked.nodes) if asked.hide_names else None
    packing = Packing(asked, asked.clock.now().replace(microsecond=0), names, ledger, types, view)
    if names is not None:
        consumers = [entry.consumer for entry in ledger.entries]
        ledger_file = next((path for path in asked.ledgers if not is_absent(path)), asked.ledgers[0])
        records = hostfiles.tenancies_beside(ledger_file).value.records.values()
        consumers += [record.tenancy.consumer for record in records if record.tenancy is not None]
        names.learn(consumer for consumer in consumers if consumer is not None)
        learn_pods(packing, names)
        # The section that packs a file notes that it could not be read.
        with suppress(OSError, DamagedError):
            names.learn(checkpoint.consumers(checkpoint.parse(asked.kubelet.checkpoint.read_bytes())).values())
        with suppress(OSError, DamagedError):
            names.learn_view(from_json((asked.roots.run / published.VIEW_FILE).read_bytes(), NodeView))
    return packing


# --- the sections


def _host(packing: Packing) -> Collected:
    copy = copy_host(packing.asked.kernel)
    packing.unread.extend(map(_not_read, copy.unread))
    packing.left_out.extend(LeftOut(what, why) for what, why in LEFT_OUT.items())
    return {f"{archive.HOST}{path}": entry for path, entry in copy.members.items()}


def _kubelet(packing: Packing) -> Collected:
    paths, found = packing.asked.kubelet, dict[str, Entry]()
    if (content := packing.content(paths.root / "config.yaml")) is not None:
        found |= packing.understood(paths.root / "config.yaml", f"{KUBELET}/config.yaml", content, files.fit_config)
        packing.left_out.append(LeftOut(str(paths.root / "config.yaml"), "keys that do not concern devices"))
    if (content := packing.content(paths.checkpoint)) is not None:
        ours = {*packing.ledger.resources, *(resource.name for resource in packing.view.resources)}

        def fit(content: bytes) -> bytes:
            return files.fit_checkpoint(checkpoint.parse(content), ours, packing.names)

        place = f"{KUBELET}/device-plugins/{paths.checkpoint.name}"
        found |= packing.understood(paths.checkpoint, place, content, fit)
        packing.left_out.append(LeftOut(str(paths.checkpoint), "answers of other plugins than gpuvirt"))
    if sockets := "".join(f"{name}\n" for name in _sockets(packing)):
        found["kubelet/sockets.txt"] = sockets.encode()
    return found


def _sockets(packing: Packing) -> Iterable[str]:
    for folder in ("device-plugins", "pod-resources", "plugins_registry"):
        try:
            entries = sorted((packing.asked.kubelet.root / folder).iterdir())
            yield from (f"{folder}/{entry.name}" for entry in entries if entry.is_socket())
        except OSError as error:
            packing.refused(packing.asked.kubelet.root / folder, error)


def _agent(packing: Packing) -> Collected:
    asked, found = packing.asked, dict[str, Entry]()
    state_file = asked.roots.run / published.VIEW_FILE
    if (content := packing.content(state_file)) is not None:
        place = f"{archive.HOST}/run/{published.VIEW_FILE}"
        found |= packing.understood(state_file, place, content, lambda json: packing.picture(from_json(json, NodeView)))
    ledger = next((path for path in asked.ledgers if not is_absent(path)), asked.ledgers[0])
    if (content := packing.content(ledger)) is not None:
        place = f"{archive.HOST}/var/lib/gpuvirt/ledger.json"
        found |= packing.understood(ledger, place, content, lambda json: _fit_ledger(packing, json))
    drivers = asked.roots.local(hostfiles.DRIVERS)
    if not is_absent(drivers) and (content := packing.content(drivers)) is not None:
        found[f"{archive.HOST}{hostfiles.DRIVERS}"] = content
    if asked.config is not None and (content := packing.content(asked.config)) is not None:
        place = "config/node.yaml"
        found |= packing.understood(asked.config, place, content, lambda yaml: packing.text(_without_comments(yaml)))
        packing.left_out.append(LeftOut(str(asked.config), "comments"))
    return found


def _without_comments(content: bytes) -> bytes:
    """Return the values of a YAML file; comments may contain any names, and are left out."""
    try:
        return plain.write(plain.read(content.decode(), where="node.yaml").content).encode()
    except (ConfigError, UnicodeDecodeError) as error:
        raise DamagedError(f"can't be parsed: {error}") from error


def _fit_ledger(packing: Packing, content: bytes) -> bytes:
    ledger, _ = agentstate.LEDGER.decode(content)
    return content if packing.names is None else agentstate.LEDGER.encode(packing.names.ledger(ledger))


def _devices(packing: Packing) -> Collected:
    return {"devices.json": packing.picture(packing.view)}


def _doctor(packing: Packing) -> Collected:
    asked = packing.asked
    around = EvidenceSources(
        kubelet=asked.kubelet,
        settings=asked.settings,
        ids=asked.ids,
        clock=asked.clock,
        ledger=packing.ledger,
        learn=lambda facts, _: packing.types.observing(facts),
        state_file=asked.roots.run / published.VIEW_FILE,
        procs=(asked.roots.proc,),
    )
    report = msgspec.json.format(msgspec.json.encode(diagnose(Discreet(asked.kernel), around)), indent=1)
    return {"doctor.json": packing.text(report)}


def _logs(packing: Packing) -> Collected:
    if not packing.asked.logs:
        how = "no --log given: kubectl logs -n gpu-operator POD > agent.log, then gpuvirt support --log agent.log"
        packing.left_out.append(LeftOut("logs", how))
    found: dict[str, Entry] = {}
    for number, path in enumerate(packing.asked.logs, start=1):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - LOG_BYTES))
                content = file.read(LOG_BYTES)
        except OSError as error:
            packing.refused(path, error)
            continue
        if size > LOG_BYTES:
            packing.left_out.append(LeftOut(str(path), f"all but its last {LOG_BYTES >> 20} MiB"))
        # Names of log files often are names of pods.
        name = f"{number}-{_fit_for_files(path.name)}" if packing.names is None else f"{number}.log"
        found[f"logs/{name}"] = packing.text(content, is_log=True)
    return found


SECTIONS: tuple[Section, ...] = (
    Section("host", "the host's devices: files of /sys, /proc and /dev by their paths", _host),
    Section("kubelet", "its device settings, the allocations of pods, the sockets of plugins", _kubelet),
    Section("agent", "its state, ledger, settings, and the original drivers of functions", _agent),
    Section("shares", "the records of shares of GPUs, and the CDI specs of their containers", collect_shares),
    Section("devices", "the devices of the host now, as `gpuvirt devices -o json` prints them", _devices),
    Section("doctor", "the findings on the host, as `gpuvirt doctor -o json` prints them", _doctor),
    Section("logs", "the logs of --log", _logs),
)
"""The sections of an archive; a new section needs a function and a line here."""


# --- shared by the sections


def _not_read(unread: Unread) -> NotRead:
    return NotRead(unread.path, unread.errno, unread.detail if unread.errno is None else meaning(unread.errno))


def _fit_for_files(name: str) -> str:
    allowed = (char if char.isascii() and (char.isalnum() or char in "-._") else "_" for char in name)
    return "".join(allowed)[:100] or "host"


def report(packed: Packed, written: str) -> Iterable[str]:
    """Yield the lines that `gpuvirt support` prints: the contents of an archive, and missing parts with the reason."""
    manifest = packed.manifest
    yield f"{written}: {max(1, len(packed.content) >> 10):,} KiB, of node {manifest.node}"
    for section in manifest.collected:
        what = f"{section.files:>5} files, {section.bytes:>9,} bytes" if section.files else "nothing"
        yield f"  {section.name:<8} {what:<23}  {section.about}"
    absent = [file for file in manifest.unread if file.errno == errno.ENOENT]
    failed = [file for file in manifest.unread if file.errno != errno.ENOENT]
    if failed:
        yield f"{count_of(len(failed), 'file')} could not be read:"
        yield from (f"  {file.path}: {file.why}" for file in failed[:MOST_LINES])
    if len(failed) > MOST_LINES:
        yield f"  and {len(failed) - MOST_LINES} more; {archive.MANIFEST} lists all"
    if absent:
        yield f"files that do not exist: {', '.join(file.path for file in absent[:MOST_LINES])}"
    if not manifest.privileged:
        yield "as root, gpuvirt support can read more files"
    yield from (f"no logs: {part.why}" for part in manifest.left_out if part.what == "logs")
    if not manifest.names_hidden:
        yield "the archive has the names of the node, pods and namespaces; --hide-names replaces them"
    yield f"Check the content before you send it (tar xf); {archive.MANIFEST} lists what was left out, and why."
