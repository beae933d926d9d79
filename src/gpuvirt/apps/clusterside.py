"""The agent's cluster side, put together: its node and the ConfigMap are followed, and the node's state is told."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from gpuvirt.clock import Clock
from gpuvirt.cluster.agent import wishes
from gpuvirt.cluster.agent.statelabel import Source, StateLabel
from gpuvirt.cluster.agent.troubles import trouble_of
from gpuvirt.cluster.client import Client, Collection
from gpuvirt.cluster.credentials import Credentials
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.mirror import News, ObjectKey
from gpuvirt.cluster.reflector import Reflector
from gpuvirt.cluster.resources import NODES, ConfigMap, Node, config_maps
from gpuvirt.facts.ids import ConfigMapName, NodeName
from gpuvirt.model.reasons import Reason
from gpuvirt.tasks import keep_going


class Follower(wishes.Listener, Source, Protocol):
    """The agent, as far as it has to do with the cluster."""

    def hear_trouble(self, who: str, trouble: Reason | None, /) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """What the agent has to do with the API server; it does all else without."""

    credentials: Credentials
    node: NodeName
    config_map: ConfigMapName

    async def run(self, agent: Follower, clock: Clock) -> None:
        """Hear and tell for ever; what fails is started again by itself."""
        client, random = Client(self.credentials), Random()  # noqa: S311  it keeps agents apart, and no secrets
        namespace = self.credentials.namespace
        nodes = Reflector(client, Collection(NODES, Node, self.node), clock, random)
        maps = Reflector(client, Collection(config_maps(namespace), ConfigMap, self.config_map), clock, random)
        label = StateLabel(client, self.node, clock, random)
        hear_wish = wishes.hear_node(agent, ObjectKey("", self.node))
        hear_map = wishes.hear_config_map(agent, ObjectKey(namespace, self.config_map))

        def hear_node(news: News[Node]) -> None:
            hear_wish(news)
            label.hear(news)

        def told(who: str, what: str) -> Callable[[ApiError | None], None]:
            return lambda error: agent.hear_trouble(f"cluster: {who}", trouble_of(error, what))

        node_trouble = told("node", "to read its node")
        map_trouble = told("config map", f"to read the ConfigMap {namespace}/{self.config_map}")
        label_trouble = told("state", "to label its node")
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_going("cluster: node", lambda: nodes.run(hear_node, node_trouble), clock))
            group.create_task(keep_going("cluster: config map", lambda: maps.run(hear_map, map_trouble), clock))
            group.create_task(keep_going("cluster: state", lambda: label.run(agent, label_trouble), clock))
