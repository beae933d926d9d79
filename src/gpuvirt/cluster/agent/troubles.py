"""What keeps the agent from the API server, as a reason that its view shows."""

from gpuvirt.cluster.failures import ApiError, ForbiddenError, UnauthorizedError
from gpuvirt.model.reasons import Reason, nodeproblems


def trouble_of(error: ApiError | None, what: str) -> Reason | None:
    """Return what is wrong, None where nothing is; `what` says what the API server is needed for."""
    if error is None:
        return None
    if isinstance(error, ForbiddenError | UnauthorizedError):
        return nodeproblems.api_forbidden(what, str(error))
    return nodeproblems.api_server_away(what, str(error))
