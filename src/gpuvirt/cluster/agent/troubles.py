"""What keeps the agent from the API server, as a reason that its view shows."""

from gpuvirt.cluster.failures import ApiError, ForbiddenError, UnauthorizedError
from gpuvirt.model.reasons import Reason, ReasonCode


def trouble_of(error: ApiError | None, what: str) -> Reason | None:
    """Return what is wrong, None where nothing is; `what` says what the API server is needed for."""
    if error is None:
        return None
    if isinstance(error, ForbiddenError | UnauthorizedError):
        return Reason(
            ReasonCode.API_FORBIDDEN,
            "the API server",
            f"does not permit the agent {what}; it is tried again, and all stays as it is",
            seen=str(error),
            fix="give the agent's service account the roles of deploy/node.yaml",
        )
    return Reason(
        ReasonCode.API_SERVER_AWAY,
        "the API server",
        f"does not serve the agent, which wants {what}; it is tried again, and all stays as it is",
        seen=str(error),
        fix="none on this node where the API server is down; else look for what is between the two",
    )
