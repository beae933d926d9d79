"""The agent's state: observations, desired state, plans, and the offers that follow from them."""
