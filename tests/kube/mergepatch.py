"""A merge patch, as API servers apply it."""


def merged_of(document: dict[str, object], patch: dict[str, object]) -> dict[str, object]:
    """Apply a merge patch (RFC 7386)."""
    merged = dict(document)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            before = merged.get(key)
            merged[key] = merged_of(before if isinstance(before, dict) else {}, value)
        else:
            merged[key] = value
    return merged
