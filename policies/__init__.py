"""Policies: what to send where. Pure code that loads, checks and evaluates YAML."""
