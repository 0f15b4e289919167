"""What several commands of `tidegate` take."""

import sys
from pathlib import Path

import click

config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Configuration file; without it the first of $TIDEGATE_CONFIG, ./config.yaml and "
    "/etc/tidegate/config.yaml that there is.",
)


def prompt_text(prompt: str) -> str:
    """Return the prompt of a command line; `-` means standard input."""
    return sys.stdin.read() if prompt == "-" else prompt
