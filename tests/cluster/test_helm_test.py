"""`helm test` runs its pod on a real node: its rights suffice, and a working installation passes."""

import pytest

from tests.cluster.chartlab import NAMESPACE, Install

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]


def test_helm_test_passes_for_a_working_installation(user: Install) -> None:
    """tests/controller/install/test_verify.py has those that do not work."""
    release = user.installed("sandboxWorkloads.enabled=true", "discover.enabled=false")
    done = user.run("test", release, "-n", NAMESPACE, "--timeout=120s")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{user.pods()}"
