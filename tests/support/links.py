"""Times on links that nothing else uses."""

from shardwise.planner.hardware.links import Transfer


def alone_s(transfer: Transfer) -> float:
    return max(transfer.occupied_s.values()) + transfer.latency_s
