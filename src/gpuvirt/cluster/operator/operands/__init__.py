"""What runs on nodes, as objects: a policy and what is known of the cluster, rendered; nothing is asked or sent."""
