"""A recording proxy in front of an engine: agents of others speak their own protocol, and their calls become turns."""
