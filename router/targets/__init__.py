"""What can answer: HTTP client for engines and upstreams, supervisor of child engines."""
