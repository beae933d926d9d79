"""The controller: it observes the cluster's objects, decides what nodes need, and writes that to the API server.

One function decides about one node, and a memory keeps the result until an input has changed; without the memory, the
same code decides about all nodes. No counter follows events, so no event can be missed. Refused: counters that events
increase and decrease; a second, incremental code path.

`decide` knows no time. The controller pauses for 20 times as long as a decision has taken, up to 0.2 s, and the writer
delays a policy's status until a second after its last write. A relabelled node costs two writes, of Node and GpuNode;
with one, each agent would have to watch the controller's other inputs.
"""
