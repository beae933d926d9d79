"""Why a claim (DRA) is not prepared, or not given back."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

WAITS = ReasonCode.CLAIM_WAITS
RETRIED = "no action needed: the kubelet asks again"
TRIED_AGAIN = "no action needed: the agent tries again"
THE_GPUS = "the node's GPUs"


def unknown(claim: str, seen: str) -> Reason:
    """The scheduler's decision is at the API server alone."""
    message = "can't be prepared: which GPUs it has is not known"
    fix = f"kubectl get resourceclaim {claim} -o yaml shows its allocation; {RETRIED}"
    return Reason(ReasonCode.CLAIM_UNKNOWN, claim, message, (Seen("", seen),), fix)


def invalid(claim: str, path: str, what: str, fix: str) -> Reason:
    """The claim asks for what a GPU of gpuvirt's does not have."""
    return Reason(ReasonCode.CLAIM_INVALID, claim, f"can't be prepared: {what}", (Seen(path),), fix)


def not_for_claims(claim: str, gpu: str, *, is_present: bool) -> Reason:
    """The slice by which the scheduler decided is an old one."""
    what = f"claims do not get {gpu} any more" if is_present else f"this node has no GPU {gpu}"
    fix = "delete the pod and the claim: a new claim gets another GPU; or give the GPU the mode claims again"
    return invalid(claim, "$.status.allocation", what, fix)


def waits(claim: str, why: str, *, is_ending: bool = False) -> Reason:
    """The kubelet's next call may find the GPU, or may give it back (`is_ending`): until then the pod waits."""
    message = "is not given back yet" if is_ending else "is not prepared yet"
    return Reason(WAITS, claim, message, (Seen("", why),), RETRIED)


def not_written(claim: str, error: str) -> Reason:
    """A restart would forget it."""
    fix = "make the agent's folders writable again (df, mount); the kubelet asks again"
    return Reason(ReasonCode.CLAIM_NOT_WRITTEN, claim, "can't be prepared or given back", (Seen("", error),), fix)


def not_published(subject: str, why: str, fix: str = TRIED_AGAIN) -> Reason:
    """Claims get no such GPU until that is mended."""
    return Reason(ReasonCode.CLAIMS_NOT_POSSIBLE, subject, f"can't be published for claims: {why}", fix=fix)


def without_client() -> Reason:
    """Claims are at the API server alone."""
    fix = "run the agent in a pod or with --kubeconfig, or give the node's GPUs another mode than claims"
    return not_published(THE_GPUS, "the agent has no client of the API server", fix)


def without_shape(gpu: str, shape: str, why: str) -> Reason:
    """The GPU lacks the shape for good."""
    return not_published(gpu, f"it has no shape {shape}: {why}", "gpuvirt slices --dry-run shows each GPU's shapes")


def too_old(version: str, lowest: str) -> Reason:
    """Older schedulers give a GPU twice, or forget what they have given."""
    fix = f"upgrade Kubernetes to {lowest} or later, or give the node's GPUs another mode than claims"
    return not_published(THE_GPUS, f"Kubernetes is {version}, whose scheduler may give a GPU twice", fix)


def offered_by_other(gpu: str, driver: str, name: str) -> Reason:
    """Two drivers would give the GPU twice."""
    fix = f"remove that driver from the node, or give {gpu} another mode than claims"
    return not_published(gpu, f"the DRA driver {driver} has it, too, in its ResourceSlice {name}", fix)


def fields_dropped(name: str, field: str) -> Reason:
    """The API server's gate for a field is off: without it, all shapes would be free at once."""
    fix = "switch the feature gates DRAPartitionableDevices and DRADeviceTaints on in kube-apiserver and kube-scheduler"
    return not_published(THE_GPUS, f"the API server has dropped the field {field} of the ResourceSlice {name}", fix)
