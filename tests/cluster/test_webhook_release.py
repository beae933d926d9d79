"""The admission webhook as the chart installs it, on a real node: its Service, and the controller's certificate."""

import json
from pathlib import Path

import pytest
import yaml
from lab.cluster import settings

from gpuvirt.plain import Plain
from tests.cluster.chartlab import NAMESPACE, Install
from tests.cluster.webhooklab import NAME, pod, until
from tests.deploy.chart.helmchart import at, items
from tests.web.certificates import Authority

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.xdist_group("cluster"),
]

VALUES = ("webhook.enabled=true", f"webhook.config.classes.{settings.EXEMPT}.profile=hot-plug")
CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": settings.EXEMPT},
    "handler": "runc",
}


def admitted(user: Install) -> Plain:
    """Return a pod of Kata as the API server would store it."""
    given = json.dumps(pod("train", settings.EXEMPT))
    found: Plain = yaml.safe_load(user.kubectl("create", "--dry-run=server", "-f", "-", "-o", "json", given=given))
    return found


def test_a_release_serves_pods_of_kata_and_leaves_no_secret(user: Install, tmp_path: Path) -> None:
    user.apply(CLASS)
    try:
        release = user.installed(*VALUES)
        names = [at(item, "name") for item in items(at(admitted(user), "spec", "initContainers"))]
        assert names == ["nvidia", "gridd"]
        secret = json.loads(user.kubectl("get", "secret", f"{NAME}-cert", "-n", NAMESPACE, "-o", "json"))
        assert set(secret["data"]) == {"tls.crt", "tls.key", "ca.crt"}
        bundle = user.kubectl("get", "mutatingwebhookconfiguration", NAME, "-o", "json")
        assert json.loads(bundle)["webhooks"][0]["clientConfig"]["caBundle"] == secret["data"]["tls.crt"]
        # An upgrade leaves the controller's field alone.
        user.must("upgrade", release, "deploy/chart", "-n", NAMESPACE, "--reuse-values", "--set=webhook.replicas=1")
        assert items(at(admitted(user), "spec", "initContainers"))
        # A certificate of the user's own takes the field over.
        pair = Authority(tmp_path).server("own", alternatives=f"DNS:{NAME}.{NAMESPACE}.svc")
        files = (f"--cert={pair.certificate}", f"--key={pair.key}")
        user.kubectl("create", "secret", "tls", "own", "-n", NAMESPACE, *files)
        own = ("--set=webhook.tls.secretName=own", f"--set-file=webhook.tls.caBundle={tmp_path}/authority.crt")
        user.must(
            "upgrade", release, "deploy/chart", "-n", NAMESPACE, "--reuse-values", "--wait", "--force-conflicts", *own
        )
        assert items(at(admitted(user), "spec", "initContainers"))
        user.uninstall(release)
        until(lambda: f"{NAME}-cert" not in user.kubectl("get", "secrets", "-n", NAMESPACE, "-o", "name"), user.pods)
    finally:
        user.cluster.kubectl("delete", "runtimeclass", settings.EXEMPT, "--ignore-not-found")
