"""The back end of a host with libvirt: its VMs and their devices, the possible actions on them, and the calls."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic  # noqa: TID251  how long to wait for a call, in a process of its own
from xml.etree import ElementTree as Xml

import libvirt
import libvirt_qemu
import msgspec

from gpuvirt.model.workers.hypervisor import Abilities, Ability, Action, Call, Power, VmKey, WorkerVm
from gpuvirt_schedules.hypervisors.libvirt.session import LibvirtSession, is_open, problem_of, words
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem


class RunningCall:
    """One call that is under way. Its thread dies with the child: libvirt continues the call that it has received."""

    def __init__(self, call: Call, connection: libvirt.virConnect, make: Callable[[], object]) -> None:
        """Begin it."""
        self.call = call
        self.unreported: BackEndError | None = None
        """The error of a call that has failed after it was accepted."""
        self._connection, self._make = connection, make
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether libvirt has answered."""
        return self._ended.is_set()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the answer, and return whether it has come; raises the BackEndError with which the call failed."""
        if not self._ended.wait(seconds):
            return False
        error, self.unreported = self.unreported, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        try:
            self._make()
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            self.unreported = problem_of(error, is_certain=False, is_alive=is_open(self._connection))
        finally:
            self._ended.set()


class Running:
    """The calls of one client that are under way; several threads use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[RunningCall] = []

    def begin(self, call: Call, connection: libvirt.virConnect, make: Callable[[], object]) -> RunningCall:
        """Begin a call on a connection of its own."""
        begun = RunningCall(call, connection, make)
        with self._lock:
            self._calls = [*(other for other in self._calls if not other.has_ended or other.unreported), begun]
        return begun

    def failure(self, call: Call) -> BackEndError | None:
        """Return once why the same call failed after it was accepted; None if it did not, or its connection broke."""
        with self._lock:
            for earlier in self._calls:
                error = earlier.unreported
                if earlier.call == call and earlier.has_ended and error is not None:
                    earlier.unreported = None
                    return error if error.problem is not Problem.UNREACHABLE else None
        return None

    def has(self, vm: VmKey) -> bool:
        """Return whether a call for this VM is under way."""
        with self._lock:
            return any(other.call.vm == vm and not other.has_ended for other in self._calls)


AGENT = "org.qemu.guest_agent.0"


class VmDevices(msgspec.Struct, frozen=True):
    """The devices in a VM's XML, and the state of its guest agent."""

    mdevs: tuple[str, ...]
    """The UUIDs of its mediated devices, in lower case."""
    pci_devices: int
    """How many PCI functions of the host it has: whole GPUs, and vGPUs on virtual functions."""
    is_agent_connected: bool
    """Whether a guest agent runs in it."""


def devices_of(domain: str) -> VmDevices:
    """Return the devices of a VM's XML; raises BackEndError."""
    root = _parsed(domain)
    hostdevs = root.findall("devices/hostdev[@mode='subsystem']")
    mdevs = [hostdev.find("source/address") for hostdev in hostdevs if hostdev.get("type") == "mdev"]
    agents = root.findall(f"devices/channel/target[@name='{AGENT}']")
    return VmDevices(
        tuple(mdev.get("uuid", "").lower() for mdev in mdevs if mdev is not None),
        sum(hostdev.get("type") == "pci" for hostdev in hostdevs),
        any(agent.get("state") == "connected" for agent in agents),
    )


def mdev_types(connection: libvirt.virConnect) -> Mapping[str, str] | None:
    """Return the types of the host's mediated devices by UUID, as in sysfs (`nvidia-63`); None if they are unknown."""
    try:
        found = [
            device.XMLDesc(0) for device in connection.listAllDevices(libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV)
        ]
    except libvirt.libvirtError:
        return None  # no driver of node devices, or no right; a device that ended meanwhile
    return dict(mdev_type(device) for device in found)


def mdev_type(device: str) -> tuple[str, str]:
    """Return UUID and type of a mediated device's XML; raises BackEndError."""
    root = _parsed(device)
    capability = root.find("capability[@type='mdev']")
    # `uuid` since libvirt 7.3; the name has been mdev_UUID, with the parent's address behind it since 7.7.
    name = (root.findtext("name") or "").removeprefix("mdev_")[:36].replace("_", "-")
    uuid = capability.findtext("uuid") if capability is not None else None
    kind = capability.find("type") if capability is not None else None
    return (uuid or name).lower(), kind.get("id", "") if kind is not None else ""


def _parsed(text: str) -> Xml.Element:
    try:
        return Xml.fromstring(text)  # noqa: S314  of a server that the CA proves; expat bounds what entities become
    except Xml.ParseError as error:
        raise BackEndError(Problem.INCOMPLETE, f"XML that can't be read: {error}", is_certain=True) from error


# All VMs of a host with libvirt.
MOVING = frozenset({libvirt.VIR_DOMAIN_PAUSED_SAVE, libvirt.VIR_DOMAIN_PAUSED_STARTING_UP})
"""Why a VM is paused whose memory libvirt writes or reads. An admin's pause is no change: the VM keeps its devices."""


def read(connection: libvirt.virConnect, running: Running) -> list[WorkerVm]:
    """Return all VMs; raises BackEndError, and errors of libvirt."""
    types: Mapping[str, str] | None = None
    found = list[WorkerVm]()
    for domain in connection.listAllDomains(0):
        try:
            mdevs = devices_of(domain.XMLDesc(0)).mdevs
            if mdevs and types is None:
                types = mdev_types(connection) or {}
            found.append(_worker_vm(domain, mdevs, types or {}, running))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
            # It was deleted, or it has ended and libvirt does not keep it: it does not exist.
    return found


def _worker_vm(domain: libvirt.virDomain, mdevs: Iterable[str], types: Mapping[str, str], running: Running) -> WorkerVm:
    key = VmKey(domain.UUIDString())
    # Before the state: a call that ends in between has then changed it.
    is_changing = running.has(key)
    power = power_of(domain)
    return WorkerVm(
        key=key,
        name=domain.name(),
        system_uuid=key.lower(),  # libvirt refuses a VM whose SMBIOS has another one
        power=power,
        vgpu_types=tuple(types.get(mdev, "") for mdev in mdevs),
        is_changing=is_changing or (power is Power.ON and is_moving(domain)),
    )


def power_of(domain: libvirt.virDomain) -> Power:
    """Return a VM's power. One that is paused, sleeps or has crashed while its QEMU lives has its devices: it is on."""
    if domain.isActive():
        return Power.ON
    return Power.SUSPENDED if domain.hasManagedSaveImage() else Power.OFF


def is_moving(domain: libvirt.virDomain) -> bool:
    """Return whether libvirt is saving, resuming, migrating or ending a VM that is on, by whatever client.

    None of these calls waits for QEMU, which answers nothing while it moves a vGPU's memory.
    """
    state, reason, *_ = domain.state()
    if state == libvirt.VIR_DOMAIN_SHUTDOWN or (state == libvirt.VIR_DOMAIN_PAUSED and reason in MOVING):
        return True
    try:
        if domain.controlInfo()[0] != libvirt.VIR_DOMAIN_CONTROL_OK:
            return True
        return domain.jobInfo()[0] != libvirt.VIR_DOMAIN_JOB_NONE
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            raise
        return True  # it has just ended, or is busy


FAILS_WITHIN_S = 2.0
"""How long a call is watched that libvirt has begun. What it refuses, and a QEMU that does not start, fail earlier."""
POLL_S = 0.1
FIXED_TYPE = "the type of a vGPU is that of its mediated device, which libvirt does not change"
CALLS: Mapping[Action, Callable[[libvirt.virDomain], object]] = {
    Action.SUSPEND: libvirt.virDomain.managedSave,
    Action.SHUT_DOWN: libvirt.virDomain.shutdown,
    Action.POWER_OFF: libvirt.virDomain.destroy,
    Action.START: libvirt.virDomain.create,
}
"""The function of libvirt for each call; only a VM's shutdown is answered at once."""
QEMU_DECIDES = 8_006_000
"""The version of libvirt from which QEMU's blockers decide on a save. Older ones refuse every PCI device and mdev."""
QUERY = '{"execute": "query-migrate"}'
POSSIBLE = Ability(True)
TAINTS = "the check asked QEMU's monitor: libvirt notes `custom-monitor` for this VM until it ends"
_NOT_RUNNING = Ability(
    None,
    Problem.NO_SUSPEND,
    "only a running QEMU can report this, and it does not run; `leave: ShutDown` needs no proof",
)
_NO_AGENT = Ability(
    None, Problem.TOOLS_MISSING, "no guest agent is connected; the guest may follow ACPI's power button"
)


def make(session: LibvirtSession, running: Running, call: Call) -> None:
    """Make a call; raises BackEndError. Return when it is done, or runs for some time without failing.

    A call that failed after that is reported in the place of the next same one: the disk of a host that is full shows
    when much of a VM's memory is written, and nobody would see it otherwise.
    """
    ask = CALLS.get(call.action)
    if ask is None:
        raise BackEndError(Problem.REFUSED, FIXED_TYPE, is_certain=True)
    if (failure := running.failure(call)) is not None:
        raise BackEndError(failure.problem, f"the last one failed: {failure.text}", is_certain=True)
    connection = session.opened()
    try:
        domain = connection.lookupByUUIDString(call.vm)
    except libvirt.libvirtError as error:
        raise problem_of(error, is_certain=True, is_alive=is_open(connection)) from error
    begun = running.begin(call, connection, partial(ask, domain))
    try:
        _watch(session, begun, call)
    except BackEndError as error:
        raise _in_wrong_power(error, domain, call.action) from error


def _watch(session: LibvirtSession, begun: RunningCall, call: Call) -> None:
    """Wait for a call's end, or until the VM shows that libvirt has begun it.

    Nothing else says that libvirt has received it. What is never received ends with the child, when its time is over.
    """
    until_s = monotonic() + FAILS_WITHIN_S
    while not begun.ends_within(POLL_S):
        if monotonic() < until_s:
            continue
        with suppress(BackEndError):  # the connection of the call itself says what has become of it
            if session.run(lambda connection: _has_begun(connection, call.vm, call.action)):
                return


def _has_begun(connection: libvirt.virConnect, key: VmKey, action: Action) -> bool:
    domain = connection.lookupByUUIDString(key)
    if action is Action.START:
        return bool(domain.isActive())
    return not domain.isActive() or is_moving(domain)


def _in_wrong_power(error: BackEndError, domain: libvirt.virDomain, action: Action) -> BackEndError:
    """Return a refusal as what it is where the VM is already on or off: libvirt has one code for all refusals."""
    if error.problem is Problem.REFUSED:
        with suppress(libvirt.libvirtError):
            is_on = bool(domain.isActive())
            if is_on is (action is Action.START):
                text = f"{error.text}; the VM is {'on' if is_on else 'off'}"
                return BackEndError(Problem.WRONG_POWER, text, is_certain=True)
    return error


class _Migration(msgspec.Struct, frozen=True, rename="kebab"):
    blocked_reasons: tuple[str, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    returned: _Migration = msgspec.field(name="return")


def check(connection: libvirt.virConnect, keys: Sequence[VmKey]) -> list[Abilities]:
    """Return the possible actions on these VMs, without VMs that do not exist. Raises errors of libvirt."""
    version, types = connection.getLibVersion(), mdev_types(connection)
    return [
        abilities(key, domain, devices_of(domain.XMLDesc(0)), version, types)
        for key, domain in _existing(connection, keys)
    ]


def _existing(connection: libvirt.virConnect, keys: Sequence[VmKey]) -> Iterator[tuple[VmKey, libvirt.virDomain]]:
    for key in keys:
        try:
            yield key, connection.lookupByUUIDString(key)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise


def abilities(
    key: VmKey, domain: libvirt.virDomain, devices: VmDevices, version: int, types: Mapping[str, str] | None
) -> Abilities:
    """Return the possible actions on one VM; `types` is None while the host's mediated devices are unknown."""
    refused = never_suspended(devices, version, is_persistent=bool(domain.isPersistent()))
    is_asked = refused is None and bool(domain.isActive())
    suspend = refused if refused is not None else _suspend(domain) if is_asked else _NOT_RUNNING
    return Abilities(
        key,
        suspend,
        POSSIBLE if devices.is_agent_connected else _NO_AGENT,
        start(devices, types),
        Ability(False, Problem.REFUSED, FIXED_TYPE),
        (TAINTS,) if is_asked else (),
    )


def never_suspended(devices: VmDevices, version: int, *, is_persistent: bool) -> Ability | None:
    """Return why a VM is not saved, whatever its QEMU says; None where QEMU decides."""
    if not is_persistent:
        return Ability(False, Problem.NO_SUSPEND, "the domain is transient: libvirt forgets it when it is off")
    if version < QEMU_DECIDES and (devices.mdevs or devices.pci_devices):
        text = (
            f"libvirt {version // 1_000_000}.{version // 1000 % 1000} saves no VM with a device of its host, 8.6 does"
        )
        return Ability(False, Problem.NO_SUSPEND, text)
    return None


def _suspend(domain: libvirt.virDomain) -> Ability:
    """Return what QEMU says of a VM that runs; no call of libvirt's own asks for it."""
    try:
        answer = msgspec.json.decode(libvirt_qemu.qemuMonitorCommand(domain, QUERY, 0), type=_Answer)
    except libvirt.libvirtError as error:
        return Ability(None, Problem.NO_SUSPEND, f"QEMU could not be asked: {words(error)}")
    except msgspec.DecodeError as error:
        return Ability(None, Problem.NO_SUSPEND, f"QEMU's answer can't be read: {error}")
    blockers = answer.returned.blocked_reasons
    return Ability(False, Problem.NO_SUSPEND, "QEMU: " + ", ".join(blockers)) if blockers else POSSIBLE


def start(devices: VmDevices, types: Mapping[str, str] | None) -> Ability:
    """Return whether the host shows the VM's mediated devices, which end with the host."""
    lacking = [mdev for mdev in devices.mdevs if types is None or mdev not in types]
    if not lacking:
        return POSSIBLE
    return Ability(None, Problem.TYPE_MISSING, f"its host shows no mediated device {', '.join(lacking)}")


class Libvirt:
    """The client of one host."""

    def __init__(self, server: str, ca: str, certificate: str, key: str) -> None:
        """Connect to nothing yet."""
        self._session = LibvirtSession(server, ca, certificate, key)
        self._running = Running()

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs; raises BackEndError."""
        return self._session.run(lambda connection: read(connection, self._running))

    def make(self, call: Call) -> None:
        """Make a call; raises BackEndError."""
        make(self._session, self._running, call)

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return the possible actions on these VMs; raises BackEndError."""
        return self._session.run(lambda connection: check(connection, vms))
