"""Named objects in one place: the protocol, its back ends, and `open_store`."""
