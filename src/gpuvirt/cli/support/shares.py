"""The section of a support archive with the shares of GPUs: the agent's records, and the CDI spec of each container.

A spec contains edits from NVIDIA's CDI spec, which users may have changed. The archive has the container, the GPUs,
the device nodes and gpuvirt's own variables of a spec; it has no mounts, no hooks, and no other variables.
"""

import re
from pathlib import Path

import msgspec

from gpuvirt import archive
from gpuvirt.agent.shares import recordstore
from gpuvirt.archive import Entry, LeftOut
from gpuvirt.cli.support.packing import Collected, Packing, is_absent
from gpuvirt.cli.support.pseudonyms import Pseudonyms
from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
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


class _Device(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    annotations: dict[str, str] = {}
    container_edits: _Edits = _Edits()


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    cdi_version: str
    kind: str
    devices: tuple[_Device, ...]


def collect(packing: Packing) -> Collected:
    """Return the records of shares and the CDI specs of containers; nothing on a host that never shared a GPU."""
    found: dict[str, Entry] = {}
    path = records_path(packing)
    if not is_absent(path) and (content := packing.content(path)) is not None:
        place = f"{archive.HOST}/var/lib/gpuvirt/{recordstore.FILE}"
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


def learn(packing: Packing, names: Pseudonyms) -> None:
    """Learn the names of the pods with shares; a file that can't be used is noted when it is packed."""
    try:
        records = recordstore.FORMAT.decode(records_path(packing).read_bytes()).value
    except (OSError, DamagedError):
        return
    for uid, pod in sorted(records.pods.items()):
        names.pod_record(uid, pod)


def records_path(packing: Packing) -> Path:
    """Return the file with the records of the agent whose ledger is packed."""
    ledgers = packing.asked.ledgers
    return next((path for path in ledgers if not is_absent(path)), ledgers[0]).with_name(recordstore.FILE)


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
    records = recordstore.FORMAT.decode(content).value
    if names is None:
        return content
    return recordstore.FORMAT.encode(ShareRecords(dict(names.pod_record(*pod) for pod in records.pods.items())))


def _fit_spec(names: Pseudonyms | None, content: bytes) -> bytes:
    spec, owners = from_json(content, _Spec), dict(sharespec.owners(content))
    devices = tuple(
        _Device(device.name, {sharespec.RECORD: _fit_owner(names, owners[device.name])}, _fit_edits(device))
        for device in spec.devices
    )
    return msgspec.json.format(msgspec.json.encode(_Spec(spec.cdi_version, spec.kind, devices)), indent=1) + b"\n"


def _fit_owner(names: Pseudonyms | None, owner: sharespec.SpecOwner) -> str:
    if names is not None:
        uid, pod = names.pod_record(owner.uid, owner.pod)
        owner = sharespec.SpecOwner(uid, ContainerName(names.container(owner.container)), pod)
    return msgspec.json.encode(owner).decode()


def _fit_edits(device: _Device) -> _Edits:
    edits = device.container_edits
    env = tuple(variable for variable in edits.env if variable.partition("=")[0] in _OWN)
    return _Edits(env, tuple(node for node in edits.device_nodes if _NODE.fullmatch(node.path)))
