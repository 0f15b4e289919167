"""The daemon: judges each request and sends it to the tier that should answer it."""
