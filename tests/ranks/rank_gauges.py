"""What each worker of a server counts from its own tables."""

from cluster import Server

HELD = ("live_rooms", "pinned_pages", "open_transfers")


def worker_gauges(server: Server, name: str) -> dict[tuple[str, str], float]:
    """By TP and PP rank."""
    with server.open("GET", "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith(f"tandem:worker_{name}{{"):
            labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
            ranks = (labels["tp_rank"].strip('"'), labels["pp_rank"].strip('"'))
            found[ranks] = float(line.rsplit(" ", 1)[1])
    return found


def held_by_workers(server: Server) -> dict[str, dict[tuple[str, str], float]]:
    """All of `HELD`."""
    return {name: worker_gauges(server, name) for name in HELD}
