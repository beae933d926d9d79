"""One node's agent: sees its devices, remembers who has them, answers who asks; knows no Kubernetes API."""
