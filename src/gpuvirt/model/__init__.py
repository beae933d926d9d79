"""All decisions: pure functions that derive the state, offers, plans and findings from frozen records."""
