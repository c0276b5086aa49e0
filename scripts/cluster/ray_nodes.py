"""A Ray cluster on loopback: a head without work and three nodes, of which one can be killed.

Run by the Python of an environment that has Ray; it reads commands from its standard input, a
word a line, and answers with a line each:

    kill NUMBER     the processes of that node end at once
    add             another node joins

The cluster ends when the input does. It prints its address first,
and that of its dashboard, which takes submitted jobs.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

from scripts.cluster.seaweed import free_ports

NODES = 3
CPUS = 2
MEMORY = 80 << 20  # of each object store
# A dead node is known to be in a few seconds; Ray's own patience is longer.
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def main() -> None:
    """Start the cluster, do as told, end it."""
    node = {
        "num_cpus": CPUS,
        "object_store_memory": MEMORY,
        "node_ip_address": "127.0.0.1",
    }
    dashboard = {
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": free_ports(1)[0],
    }
    head = {**node, **dashboard, "num_cpus": 0, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**node) for _ in range(NODES)]
    cluster.wait_for_nodes()
    url = f"http://127.0.0.1:{dashboard['dashboard_port']}"
    print(f"address {cluster.address} {url}", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["kill"]:
            cluster.remove_node(nodes[int(words[1])], allow_graceful=False)
        elif words == ["add"]:
            nodes.append(cluster.add_node(**node))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
