"""The Kubernetes API server: its client, watches, election, credentials, and the kinds of its objects."""
