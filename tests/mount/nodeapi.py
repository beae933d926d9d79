"""An API server with one node and nothing else: it lists, watches and patches that node over HTTPS."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gpuvirt.kube.resources import Metadata
from tests.kube.mergepatch import merged_of
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

NODE = "node01"
PATH = "/api/v1/nodes"


class NodeApi:
    """The node, as the API server stores it."""

    def __init__(self) -> None:
        self._node: dict[str, object] = {}
        self._version = 1
        self._changed = asyncio.Event()

    @property
    def labels(self) -> Mapping[str, str]:
        return self._metadata().labels

    @property
    def annotations(self) -> Mapping[str, str]:
        return self._metadata().annotations

    def label(self, key: str, value: str) -> None:
        """Set a label of the node."""
        self._patch({"metadata": {"labels": {key: value}}})

    def answer(self, call: Call) -> Reply:
        """Answer a request."""
        is_watch = "watch=1" in call.target
        if call.path == PATH:
            return 200, self._events() if is_watch else self._list(self._object())
        if call.path.startswith(f"{PATH}/{NODE}"):
            if call.method == "PATCH":
                self._patch(msgspec.json.decode(call.body, type=dict[str, object]))
            return 200, self._object()
        if call.path.endswith("/configmaps"):
            return 200, _silence() if is_watch else self._list()
        return NOT_FOUND

    def _metadata(self) -> Metadata:
        return msgspec.convert(self._object()["metadata"], Metadata)

    def _object(self) -> dict[str, object]:
        own: dict[str, object] = {"metadata": {"name": NODE, "uid": "1", "resourceVersion": str(self._version)}}
        return merged_of(self._node, own)

    def _list(self, *items: object) -> object:
        return {"metadata": {"resourceVersion": str(self._version)}, "items": list(items)}

    def _patch(self, patch: dict[str, object]) -> None:
        merged = merged_of(self._node, patch)
        if merged != self._node:
            self._node, self._version = merged, self._version + 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def _events(self) -> AsyncIterator[object]:
        while True:
            changed = self._changed
            yield {"type": "MODIFIED", "object": self._object()}
            await changed.wait()


async def _silence() -> AsyncIterator[object]:
    await asyncio.get_running_loop().create_future()
    yield {}


@asynccontextmanager
async def serving(api: NodeApi, authority: Authority, server: Pair, kubeconfig: Path) -> AsyncIterator[ScriptedApi]:
    """Serve a node, and write its kubeconfig."""
    async with scripted(api.answer, server, authority.certificate) as served:
        _write_kubeconfig(kubeconfig, served.port, authority)
        yield served


def _write_kubeconfig(path: Path, port: int, authority: Authority) -> None:
    cluster = f"server: 'https://127.0.0.1:{port}', certificate-authority: {authority.certificate}"
    path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{{cluster}}}}}]
users: [{{name: u, user: {{token: abc}}}}]
""")
