"""Between hospitals: a server and sites as separate processes on Flower, with TLS and signed messages."""
