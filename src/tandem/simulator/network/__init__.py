"""What lies between the actors: links with latency and loss, HTTP over them, the weather of the data plane."""
