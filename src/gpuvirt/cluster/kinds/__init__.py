"""Kinds of our own at the API server: their fields, and the schemas that the server checks them by."""
