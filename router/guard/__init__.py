"""Pure state machines that protect the service; no I/O, no clock."""
