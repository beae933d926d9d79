"""The HTTP pages of the processes: probes, metrics, the extender's verbs, and the webhook's reviews."""
