"""The door: HTTP surface, errors, dispatch to the chosen targets."""
