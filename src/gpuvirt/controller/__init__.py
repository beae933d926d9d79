"""The controller: it observes the cluster's objects, decides what nodes need, and writes that to the API server."""
