"""What operators see: metrics and the request log."""
