"""Tells which pods of the kubelet's checkpoint are gone: entries of dead pods stay there until it is next written."""

import re
from pathlib import Path

from gpuvirt.facts.ids import PodUid
from gpuvirt.kubelet.podresources import Held
from gpuvirt.model.ledger import Consumer
from gpuvirt.paths import KubeletPaths

UID = re.compile(r"[0-9A-Za-z-]+")
"""A pod's, which names its folder; those of pods from files are other than UUIDs."""


def without_gone(paths: KubeletPaths, in_file: Held, in_api: Held) -> Held:
    """Return what pods have that are not gone.

    The checkpoint's folder is the same whatever `--root-dir` a kubelet has, so the pods' folder can be another
    kubelet's: it counts where a pod of the checkpoint has its folder in it, or a pod came or went in it since the
    checkpoint was written.
    """
    has_folder = {consumer.pod_uid: _has_folder(paths.pods, consumer) for consumer in in_file.values()}
    if True not in has_folder.values() and not _pods_are_newer(paths):
        return in_file
    return {key: one for key, one in in_file.items() if key in in_api or has_folder[one.pod_uid] is not False}


def gone(before: Held, after: Held) -> frozenset[PodUid]:
    """Return the pods of which nothing is left by `without_gone`."""
    uids = (frozenset(one.pod_uid for one in held.values() if one.pod_uid is not None) for held in (before, after))
    return next(uids) - next(uids)


def _pods_are_newer(paths: KubeletPaths) -> bool:
    try:
        return paths.pods.stat().st_mtime_ns > paths.checkpoint.stat().st_mtime_ns
    except OSError:
        return False


def _has_folder(pods: Path, consumer: Consumer) -> bool | None:
    """Return whether a pod has its folder, None where its UID names none."""
    uid = consumer.pod_uid
    return (pods / uid).exists() if uid is not None and UID.fullmatch(uid) is not None else None
