"""A campaign of injected faults: what is run, what is broken, and what has to come out."""
