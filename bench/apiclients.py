"""Measures what candidates for the API client add to the agent: memory and time, imported and in use.

Each candidate runs in a process of its own that has imported the whole agent; the figures are the additional PSS and
time. In use means what the agent does: it reads its own node once, then watches it, over TLS. The candidates need not
be dependencies of the project, so they are installed in another environment:

    python3 -m venv /tmp/clients
    /tmp/clients/bin/pip install -e . lightkube kubernetes_asyncio aiohttp httpx urllib3 h11
    make lab-cluster
    .venv/bin/python -m bench.apiclients --python /tmp/clients/bin/python --lab /var/tmp/gpuvirt-lab/cluster
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lab.cluster import settings
from lab.cluster.places import REAL

HEAD = """
import asyncio, json, logging, os, ssl, sys, time
import msgspec
import gpuvirt.agent.process, gpuvirt.cli.services.node
SERVER, TOKEN, CA, NODE = (os.environ[name] for name in ("SERVER", "TOKEN", "CA", "NODE"))
HOST, PORT = SERVER.removeprefix("https://").rsplit(":", 1)
GET = f"/api/v1/nodes/{NODE}"
WATCH = f"/api/v1/nodes?fieldSelector=metadata.name%3D{NODE}&watch=1&allowWatchBookmarks=true&timeoutSeconds=60"
AUTH = {"Authorization": f"Bearer {TOKEN}"}
class Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] = {}
class Node(msgspec.Struct):
    metadata: Metadata
class Event(msgspec.Struct):
    type: str
    object: Node
def pss_kib():
    import gc; gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return int(next(line.split()[1] for line in file if line.startswith("Pss:")))
def say(**figures): print(json.dumps(figures), flush=True)
node, event = msgspec.json.Decoder(Node), msgspec.json.Decoder(Event)
before, began = pss_kib(), time.process_time()
"""

IMPORTED = """
took_s = time.process_time() - began
say(before=before, imported=pss_kib(), took_s=took_s)
async def watched(events):
    seen = 0
    try:
        async with asyncio.timeout(3):
            async for line in events:
                seen += 1
    except TimeoutError:
        pass
        assert seen, "no event was received"
    say(used=pss_kib())
"""

HTTPX = """
async def main():
    context = ssl.create_default_context(cafile=CA)
    async with httpx.AsyncClient(base_url=SERVER, headers=AUTH, verify=context, trust_env=False) as client:
        node.decode((await client.get(GET)).content)
        async with client.stream("GET", WATCH, timeout=60) as answer:
            async def lines():
                async for line in answer.aiter_lines():
                    yield event.decode(line)
            await watched(lines())
asyncio.run(main())
"""

CANDIDATES: Mapping[str, tuple[str, str]] = {
    "nothing": ("", "say(used=pss_kib())"),
    "http.client in a thread": (
        "import http.client, threading",
        """
def work():
    context = ssl.create_default_context(cafile=CA)
    for path in (GET, WATCH):
        connection = http.client.HTTPSConnection(HOST, int(PORT), timeout=10, context=context)
        connection.request("GET", path, headers=AUTH)
        answer = connection.getresponse()
        if path == GET:
            node.decode(answer.read())
        else:
            event.decode(answer.readline())
worker = threading.Thread(target=work)
worker.start()
worker.join()
say(used=pss_kib())
""",
    ),
    "h11 on asyncio's streams": (
        "import h11",
        """
async def main():
    context = ssl.create_default_context(cafile=CA)
    async def ask(path):
        reader, writer = await asyncio.open_connection(HOST, int(PORT), ssl=context)
        http = h11.Connection(h11.CLIENT)
        headers = [("Host", HOST), *AUTH.items()]
        writer.write(http.send(h11.Request(method="GET", target=path, headers=headers)))
        writer.write(http.send(h11.EndOfMessage()))
        while True:
            got = http.next_event()
            if got is h11.NEED_DATA:
                http.receive_data(await reader.read(65536))
            elif isinstance(got, h11.Data):
                yield bytes(got.data)
            elif isinstance(got, h11.EndOfMessage):
                return
    node.decode(b"".join([part async for part in ask(GET)]))
    async def lines():
        async for part in ask(WATCH):
            for line in part.splitlines():
                yield event.decode(line)
    await watched(lines())
asyncio.run(main())
""",
    ),
    "urllib3 in a thread": (
        "import urllib3, threading",
        """
def work():
    pool = urllib3.PoolManager(ca_certs=CA, cert_reqs="CERT_REQUIRED", timeout=10)
    node.decode(pool.request("GET", SERVER + GET, headers=AUTH).data)
    answer = pool.request("GET", SERVER + WATCH, headers=AUTH, preload_content=False)
    event.decode(next(iter(answer.stream())).splitlines()[0])
worker = threading.Thread(target=work)
worker.start()
worker.join()
say(used=pss_kib())
""",
    ),
    "httpx": ("import httpx", HTTPX),
    "httpx2": ("import httpx2 as httpx", HTTPX),
    "aiohttp": (
        "import aiohttp",
        """
async def main():
    context = ssl.create_default_context(cafile=CA)
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(SERVER, headers=AUTH, connector=connector) as client:
        async with client.get(GET) as answer:
            node.decode(await answer.read())
        from yarl import URL
        async with client.get(URL(WATCH, encoded=True)) as answer:
            async def lines():
                async for line in answer.content:
                    yield event.decode(line)
            await watched(lines())
asyncio.run(main())
""",
    ),
    "lightkube": (
        "import lightkube; from lightkube.resources.core_v1 import Node as KubeNode",
        """
from lightkube import AsyncClient, KubeConfig
from lightkube.config.models import Cluster, User
async def main():
    cluster = Cluster(server=SERVER, certificate_auth=CA)
    config = KubeConfig.from_one(cluster=cluster, user=User(token=TOKEN))
    client = AsyncClient(config, trust_env=False)
    await client.get(KubeNode, NODE)
    await watched(client.watch(KubeNode, fields={"metadata.name": NODE}))
asyncio.run(main())
""",
    ),
    "kubernetes_asyncio": (
        "from kubernetes_asyncio import client as kube, watch as kubewatch",
        """
async def main():
    configuration = kube.Configuration(host=SERVER, api_key={"BearerToken": f"Bearer {TOKEN}"})
    configuration.ssl_ca_cert = CA
    async with kube.ApiClient(configuration) as api:
        v1 = kube.CoreV1Api(api)
        await v1.read_node(NODE)
        async with kubewatch.Watch() as watch:
            await watched(watch.stream(v1.list_node, field_selector=f"metadata.name={NODE}", timeout_seconds=60))
asyncio.run(main())
""",
    ),
}


def measure(python: Path, name: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Return a candidate's figures: KiB before, imported and used, and the seconds of processor time for the import."""
    imports, use = CANDIDATES[name]
    program = f"{HEAD}\n{imports}\n{IMPORTED}\n{use}"
    command = [str(python), "-c", program]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    figures: dict[str, float] = {}
    for line in done.stdout.splitlines():
        figures |= json.loads(line)
    return figures


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="a Python with gpuvirt and the candidates")
    parser.add_argument("--lab", type=Path, required=True, help="the folder of a running lab cluster")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each candidate; the median counts")
    arguments = parser.parse_args()
    environment = {
        "SERVER": f"https://{REAL.address}:{REAL.port}",
        "TOKEN": settings.TOKENS.partition(",")[0],
        "CA": str(arguments.lab / "certs/apiserver.crt"),
        "NODE": settings.NODE,
    }
    print("| | imported, MB | in use, MB | import, ms |\n|---|---|---|---|")
    for name in CANDIDATES:
        rounds = [measure(arguments.python, name, environment) for _ in range(arguments.rounds)]
        sizes = [
            statistics.median(figures[key] - figures["before"] for figures in rounds) / 1e3
            for key in ("imported", "used")
        ]
        import_ms = statistics.median(figures["took_s"] for figures in rounds) * 1e3
        print(f"| {name} | {sizes[0] * 1.024:.1f} | {sizes[1] * 1.024:.1f} | {import_ms:.0f} |", flush=True)


if __name__ == "__main__":
    main()
