"""What lies between the actors: links with latency and loss, HTTP over them, the faults of the data plane."""
