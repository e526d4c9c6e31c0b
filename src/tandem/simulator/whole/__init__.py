"""The whole server in one deterministic process: its own programs over a virtual machine of one seed.

What is simulated here is the operating system, and nothing above it: threads, clock, sockets, processes and randomness.
Router, API, node, worker and data plane run as they are, with asyncio, uvicorn, Starlette and httpx unmodified.

    kernel.py           virtual time; threads of which one runs at a time; processes that end, freeze and are killed
    network.py          byte streams with delays, bounded buffers and every way in which a connection ends
    sockets.py          the API of `socket` over them; polling.py: `selectors`, `select.epoll` and `select.poll`
    threads.py          the API of `threading` and `queue`
    virtual_process.py  puts all of these in the place of Python's own, while a simulation runs
    engine.py           tokens from KV that a row has read, and the right answer is known
    torch_engine.py     the product's own engine in its place, and one alone that says what is right
    shards.py           what the engines of one replica hand to each other; collectives.py: torch.distributed below it
    groups.py           what the workers of one replica must have in common
    cluster.py          the servers of one seed, started as `tandem serve` and `tandem router` start them
    cuts.py             into how many workers the replicas of one seed are cut
    clients.py          requests as bytes, and what each of them has to end with
    faults.py           what goes wrong, drawn from the seed
    disk.py             folders of pages that servers share and that outlive them
    starvation.py       a machine that has no process, thread or memory left for a while
    spies.py            what occurs, by name, for the test that everything does
    node_checks.py      the checkers of steps of the fast worlds, in every node process
    peer_checks.py      nobody is given up or late for nothing, in every node process
    transfer_checks.py  threads, queues and reports of the data plane, in every worker process
    seldom.py           bodies that few clients send
    last_visits.py      pages that have their answer, and what nobody answers, once all is well
    world.py            one seed from start to end
"""
