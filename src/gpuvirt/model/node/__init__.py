"""The observed and the desired state of one node, and the decisions for it."""
