"""Who lives in a simulated world: servers around the production nodes, what they run on, and those who call them."""
