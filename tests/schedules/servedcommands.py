"""The objects that commands read of a served schedule beside the controller: budgets, schedules of all namespaces."""

import json
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from tests.kube.scriptedapi import Call, Reply
from tests.schedules.servedschedule import ServedSchedule, has_labels

BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
ALL_SCHEDULES = "/apis/gpuvirt.io/v1alpha1/vgpuschedules"
SCHEDULES_OF_EMPTY = "/apis/gpuvirt.io/v1alpha1/namespaces/empty/vgpuschedules"


def answering(served: ServedSchedule, user: str = "alice") -> Callable[[Call], Reply]:
    """Return the answers of a server that lists these kinds over all namespaces, too, and knows the user."""

    def answer(call: Call) -> Reply:
        if call.path == SELF_REVIEWS:
            return 201, {**json.loads(call.body), "status": {"userInfo": {"username": user}}}
        if call.path == SCHEDULES_OF_EMPTY:
            return 200, {"metadata": {"resourceVersion": str(served.version)}, "items": []}
        if call.method != "GET" or call.path not in {BUDGETS, ALL_SCHEDULES}:
            return served.answer(call)
        plural = call.path.rpartition("/")[2]
        selector = parse_qs(urlsplit(call.target).query).get("labelSelector", [""])[0]
        found = (item for path, item in served.objects.items() if path.split("/")[-2] == plural)
        items = [item for item in found if has_labels(item, selector)]
        return 200, {"metadata": {"resourceVersion": str(served.version)}, "items": items}

    return answer
