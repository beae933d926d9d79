# What gpuvirt uses of libvirt-python, which is built where libvirt's headers are, and is not there in each lint.

from collections.abc import Callable

VIR_DOMAIN_CONTROL_OK: int
VIR_DOMAIN_JOB_NONE: int
VIR_DOMAIN_NOSTATE: int
VIR_DOMAIN_PAUSED: int
VIR_DOMAIN_PAUSED_SAVE: int
VIR_DOMAIN_PAUSED_STARTING_UP: int
VIR_DOMAIN_PAUSED_MIGRATION: int
VIR_DOMAIN_SHUTDOWN: int
VIR_DOMAIN_SHUTOFF: int
VIR_CONNECT_LIST_NODE_DEVICES_CAP_MDEV: int
VIR_DOMAIN_XML_INACTIVE: int
VIR_ERR_ACCESS_DENIED: int
VIR_ERR_ARGUMENT_UNSUPPORTED: int
VIR_ERR_AUTH_FAILED: int
VIR_ERR_CONFIG_UNSUPPORTED: int
VIR_ERR_INVALID_ARG: int
VIR_ERR_NO_CONNECT: int
VIR_ERR_NO_DOMAIN: int
VIR_ERR_NO_SUPPORT: int
VIR_ERR_OPERATION_DENIED: int
VIR_ERR_OPERATION_INVALID: int
VIR_ERR_OPERATION_UNSUPPORTED: int

class libvirtError(Exception):  # noqa: N801  libvirt's name
    def __init__(self, defmsg: str) -> None: ...
    def get_error_code(self) -> int | None: ...
    def get_error_message(self) -> str | None: ...

class virDomain:  # noqa: N801
    def UUIDString(self) -> str: ...  # noqa: N802
    def name(self) -> str: ...
    def state(self) -> list[int]: ...
    def isActive(self) -> int: ...  # noqa: N802
    def isPersistent(self) -> int: ...  # noqa: N802
    def hasManagedSaveImage(self) -> int: ...  # noqa: N802
    def controlInfo(self) -> list[int]: ...  # noqa: N802
    def jobInfo(self) -> list[int]: ...  # noqa: N802
    def XMLDesc(self, flags: int = 0) -> str: ...  # noqa: N802
    def managedSave(self, flags: int = 0) -> int: ...  # noqa: N802
    def create(self) -> int: ...
    def shutdown(self) -> int: ...
    def destroy(self) -> int: ...

class virNodeDevice:  # noqa: N801
    def name(self) -> str: ...
    def XMLDesc(self, flags: int = 0) -> str: ...  # noqa: N802

class virConnect:  # noqa: N801
    def close(self) -> int: ...
    def isAlive(self) -> int: ...  # noqa: N802
    def getLibVersion(self) -> int: ...  # noqa: N802
    def listAllDomains(self, flags: int = 0) -> list[virDomain]: ...  # noqa: N802
    def listAllDevices(self, flags: int = 0) -> list[virNodeDevice]: ...  # noqa: N802
    def lookupByUUIDString(self, uuid: str) -> virDomain: ...  # noqa: N802

def open(name: str) -> virConnect: ...  # noqa: A001
def registerErrorHandler(f: Callable[[object, object], None], ctx: object) -> int: ...  # noqa: N802
