"""The shares of this node's GPUs: their records on disk, their CDI specs, and the answers to the kubelet.

HAMi-core, NVIDIA's MPS daemon or its driver makes limits of shares; gpuvirt ships no means of its own. HAMi-core has no
licence in its sources, so an admin puts the library on the nodes. It limits the memory of a container but hardly its
compute time. MPS limits compute time, but memory only for each process. The driver limits the memory of a container,
and no compute time. `hami-core-mps` and `driver-mps` take one limit from each.

A limit that is missing must not look like one that holds. The dynamic linker starts a program without a library that it
can't load, and CUDA runs without a daemon that it does not find. So the agent checks both before each start of a
container. `gpuvirt.io/enforcement` has one value, `required`, and a typo counts as that. While it is unknown what
limits shares, no units are offered. A pod's limits are decided when its record is made, and stay with it.

The driver's limit belongs to the container's cgroup, which exists only when its runtime has made it. So a hook of the
runtime sets it, and not the agent: also while no agent runs, no container starts without it.

HAMi-core counts memory in a tmpfs of the container. A folder of the host could be filled by it, and would show a
restarted container the counts of ended processes. The counts are the container's own report, so no decision uses them.

Nothing of gpuvirt's ends the MPS daemon beside a client, since SIGTERM ends all of them: it has a session of its own,
is asked to `quit`, and may take a year. Clients get only its socket `control`, because root in a container could end
the daemon by the other one.
"""
