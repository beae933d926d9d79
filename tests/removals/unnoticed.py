"""The removals that no test notices, each with the reason why the statement is no guard, or why its loss is harmless.

Where a guard protects against harm, it has a test instead of a line here. A line without its statement fails.
"""

from collections.abc import Mapping

UNNOTICED: Mapping[str, str] = {}
