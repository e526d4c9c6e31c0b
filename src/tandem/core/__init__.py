"""The deterministic core: events in, commands out. No I/O, clock, randomness, threads, logging or tensors."""
