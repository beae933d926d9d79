"""Writes a device manager's checkpoint in the format of the real kubelet."""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from gpuvirt.agent.kubelet.checkpoint import Checkpoint, Data, PodDevices

NO_TOPOLOGY = "-1"
_OFFSET, _PRIME = 0x811C9DC5, 0x01000193


def encode(data: Data) -> bytes:
    """Return the content of the checkpoint file."""
    return msgspec.json.encode(Checkpoint(data, checksum(data)))


def checksum(data: Data) -> int:
    """Return the checksum of a checkpoint: FNV-1a, 32 bits, over Go's dump of its content (spew, `%#v`)."""
    value = _OFFSET
    for byte in _dump(data).encode():
        value = (value ^ byte) * _PRIME & 0xFFFFFFFF
    return value


def _dump(data: Data) -> str:
    entries = "<nil>"
    if data.pod_device_entries is not None:
        entries = f"[{' '.join(_dump_entry(entry) for entry in data.pod_device_entries)}]"
    registered = "<nil>" if data.registered_devices is None else _dump_map(data.registered_devices, str)
    return (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries}"
        f" RegisteredDevices:(map[string][]string){registered}}}"
    )


def _dump_entry(entry: PodDevices) -> str:
    if isinstance(entry.device_ids, list):
        devices = f"([]string){_dump_list(entry.device_ids)}"
    else:
        by_node = "<nil>" if entry.device_ids is None else _dump_map(entry.device_ids, int)
        devices = f"(checkpoint.DevicesPerNUMA){by_node}"
    answer = f"[{' '.join(str(byte) for byte in entry.alloc_resp)}]" if entry.alloc_resp else "<nil>"
    return (
        f"{{PodUID:(string){entry.pod_uid} ContainerName:(string){entry.container_name}"
        f" ResourceName:(string){entry.resource_name} DeviceIDs:{devices} AllocResp:([]uint8){answer}}}"
    )


def _dump_map(content: Mapping[str, list[str] | None], order: Callable[[str], str | int]) -> str:
    keys: Iterable[str] = sorted(content, key=lambda key: (isinstance(order(key), str), order(key)))
    return f"map[{' '.join(f'{key}:{_dump_list(content[key])}' for key in keys)}]"


def _dump_list(items: list[str] | None) -> str:
    return "<nil>" if items is None else f"[{' '.join(items)}]"
