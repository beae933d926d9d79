"""`gpuvirt claims` lists the claims of gpuvirt's GPUs, and `gpuvirt why` says what one of them waits for."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpuvirt.loops.serialworker import ThreadWorker
from tests.cli import whycluster
from tests.cli.commandline import ran
from tests.cli.documentedjson import PRINTS, fits
from tests.extender.podapi import serving
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply


async def run(folder: Path, *words: str, has_claims: bool = True) -> CompletedProcess[str]:
    def answer(call: Call) -> Reply:
        return whycluster.answer(call) if has_claims or "resource.k8s.io" not in call.path else NOT_FOUND

    async with serving(answer, folder) as api:
        command = (*words, "--kubeconfig", str(api.kubeconfig))
        return await ThreadWorker("command").run(lambda: ran(*command), name="command", timeout_s=60.0)


async def test_each_claim_has_its_gpu_its_state_and_what_it_waits_for(tmp_path: Path) -> None:
    done = await run(tmp_path, "claims", "-n", "team", "-o", "json")
    assert fits(json.loads(done.stdout), PRINTS["claims"])
    found = {claim["name"]: claim for claim in json.loads(done.stdout)}
    assert {name: claim["state"] for name, claim in found.items()} == {
        "ending": "Ending",
        "kept": "Allocated",
        "pending": "Pending",
        "running": "InUse",
        "starting": "Preparing",
    }
    assert (found["running"]["devices"][0]["gpu"], found["running"]["pods"]) == ("0000:ca:00.0", ["pod-running"])
    assert found["pending"]["reason"].endswith("1 cannot allocate all claims.")
    assert found["starting"]["reason"].startswith("ClaimWaits: starting is not prepared yet; seen: claim team/running")


async def test_the_table_names_the_namespaces_of_all(tmp_path: Path) -> None:
    done = await run(tmp_path, "claims", "-A")
    assert done.stdout.splitlines()[0].split() == [
        "NAMESPACE",
        "CLAIM",
        "STATE",
        "NODE",
        "GPUS",
        "CLASSES",
        "PODS",
        "REASON",
    ]
    assert "0000:65:00.0 (passthrough)" in done.stdout
    assert (await run(tmp_path, "claims", "-n", "team", "-o", "name")).stdout.split()[0] == "claim/ending"


async def test_a_namespace_without_claims_says_so(tmp_path: Path) -> None:
    done = await run(tmp_path, "claims", "-n", "empty")
    assert (done.returncode, "The namespace empty has no claim for GPUs of gpuvirt's" in done.stdout) == (0, True)


async def test_a_cluster_without_the_kind_says_which_kubernetes_has_it(tmp_path: Path) -> None:
    done = await run(tmp_path, "claims", "-A", has_claims=False)
    assert (done.returncode, "claims need Kubernetes 1.34, GPUs by them 1.36.3" in done.stderr) == (2, True)


@pytest.mark.parametrize("target", ["claim/starting", "resourceclaims/starting", "pod/pod-starting"])
async def test_a_claim_that_is_not_prepared_is_explained_by_the_agents_reason(tmp_path: Path, target: str) -> None:
    done = await run(tmp_path, "why", target, "-n", "team", "-o", "json")
    found = json.loads(done.stdout)
    assert (found["blocker"]["code"], found["blocker"]["subject"]) == ("ClaimWaits", "starting")
    assert found["blocker"]["seen"][0]["value"] == "claim team/running has 0000:65:00.0"
    assert (found["claims"], found["pod"]) == (["starting (passthrough.gpuvirt.io)"], "team/pod-starting")


async def test_a_claim_that_no_scheduler_can_serve_is_explained_by_its_words(tmp_path: Path) -> None:
    done = await run(tmp_path, "why", "pod", "pod-pending", "-n", "team")
    text = " ".join(done.stdout.split())
    assert text.startswith("pod team/pod-pending requests claim pending (passthrough.gpuvirt.io)")
    assert "1 cannot allocate all claims." in text
    assert "gpuvirt claims -A shows which claims have GPUs" in text


async def test_a_claim_in_use_has_its_devices(tmp_path: Path) -> None:
    done = await run(tmp_path, "why", "claim/running", "-n", "team")
    assert (done.returncode, "The claim has its devices." in done.stdout) == (0, True), done.stdout


@pytest.mark.parametrize(
    ("name", "text"), [("kept", "is used by no pod"), ("runing", "does not exist; did you mean running?")]
)
async def test_a_claim_without_a_pod_and_one_that_does_not_exist(tmp_path: Path, name: str, text: str) -> None:
    done = await run(tmp_path, "why", f"claim/{name}", "-n", "team")
    assert (done.returncode, text in " ".join(done.stdout.split())) == (1, True), done.stdout
