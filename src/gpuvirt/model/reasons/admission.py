"""Why the admission webhook refuses a pod."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def units_in_kata(path: str, resource: str, runtime_class: str) -> Reason:
    """Units are a part of a GPU on the host's driver, which a VM does not share."""
    message = f"requests {resource}, units of a shared GPU, which containers of RuntimeClass {runtime_class} can't use"
    fix = "request a vGPU type instead, or leave spec.runtimeClassName out"
    return Reason(ReasonCode.UNITS_IN_KATA, "the pod", message, (Seen(path),), fix)


def mdev_in_kata(path: str, resource: str, runtime_class: str) -> Reason:
    """Kata's runtimes can't plug mediated devices (docs/kata.md)."""
    message = f"requests {resource}, a mediated device, which RuntimeClass {runtime_class} can't plug into a VM"
    fix = (
        "request a vGPU that is a VF of a GPU, or a whole GPU; if this Kata can plug mediated devices, the admin sets"
        f" `mdev: allow` for class {runtime_class} in the webhook's config"
    )
    return Reason(ReasonCode.MDEV_IN_KATA, "the pod", message, (Seen(path),), fix)


def container_name_taken(path: str, name: str, detail: str) -> Reason:
    """Containers of a pod have different names, and the webhook adds one of this name."""
    message = f"has the same name as the container {name} that the webhook adds to pods with a vGPU; {detail}"
    fix = f"remove the container, since the webhook adds {name}, or rename it"
    return Reason(ReasonCode.INJECTED_NAME_TAKEN, f"container {name}", message, (Seen(path),), fix)


def volume_name_taken(path: str, name: str, expected: str) -> Reason:
    """Volumes of a pod have different names, and the webhook adds one of this name."""
    message = f"has the same name as the volume {name} that the webhook adds to pods with a vGPU; expected {expected}"
    return Reason(ReasonCode.INJECTED_NAME_TAKEN, f"volume {name}", message, (Seen(path),), "rename the volume")


def amount_invalid(path: str, detail: str) -> Reason:
    """Extended resources are counted in whole devices."""
    message = "has an amount that is not a whole number"
    fix = "request a whole number, as in 1"
    return Reason(ReasonCode.VGPU_AMOUNT_INVALID, "a vGPU request", message, (Seen(path, detail),), fix)


def licence_secret_invalid(path: str, value: str, detail: str) -> Reason:
    """The annotation becomes the name of a Secret in a volume of the pod."""
    message = f"is not the name of a Secret: {detail}"
    fix = "set it to the name of a Secret of the pod's namespace that has the licence's token, or remove it"
    return Reason(ReasonCode.LICENCE_SECRET_INVALID, "the annotation", message, (Seen(path, value),), fix)


def webhook_not_configured(file: str, detail: str) -> Reason:
    """The webhook can't know what to add to a pod."""
    message = "has no valid config yet"
    fix = "correct the config; the webhook reads it again within 10 s of a change"
    return Reason(ReasonCode.WEBHOOK_NOT_CONFIGURED, "the webhook", message, (Seen(file, detail),), fix)
