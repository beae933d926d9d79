"""The Kubernetes API server: its client, watches, election, credentials, and the kinds of its objects.

One loop lists and watches: the reflector makes requests and pauses; `cache` decides, from each answer, what the
collection contains and what to request next. So each order of errors, expired versions and restarts is a test without a
server. Consumers get all objects, not events, and nothing while the server does not answer: silence never reads as a
deletion.

What a reader might want to simplify:

- Every eighth watch begins with a new list. A server that was restored from a backup sends no event to a watch that
  waits for a later version.
- Streaming lists come first, pages are the fallback. An unfinished stream never counts as the whole collection.
- The list of API groups never proves that a kind is absent, since a server that has just started lists few groups. Only
  a 404 for the kind itself does.
- The controller gathers a busy watch for 100 ms; agents and the extender read each event at once.

Refused: PartialObjectMetadata, since agents need the node's capacity and the controller its taints, and msgspec skips
unknown fields anyway. Aggregated discovery, hundreds of kB where there are many CRDs. A watch of
CustomResourceDefinitions, which keeps all their schemas.
"""
