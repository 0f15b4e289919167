"""The `tidegate` command."""

import errno
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click

from engine_core import standard_streams
from engine_core.errors import TidegateError
from router.cli_ask import ask
from router.cli_models import models
from router.cli_options import config_option
from router.cli_policy import check, explain

CONFIGURATION_ERROR = 2
"""Exit code when a person must change something before the daemon can run."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Commands(click.Group):
    """Commands that say in one line that their output has no room; click sees to a closed pipe.

    Ctrl-C ends them with a shell's exit code for it. Whoever was at work has said what is kept.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise click.ClickException(f"cannot write: {error.strerror}") from None
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tidegate")
def main() -> None:
    """Answer easy requests on this machine and send hard ones to a GPU."""
    standard_streams.open_missing()


@main.command()
@config_option
def serve(config: Path | None) -> None:
    """Start the daemon and its engines; SIGTERM or Ctrl-C drains and ends it."""
    # Here, because `tidegate --help` and `tidegate ask` need none of it.
    from router import app, prepare  # noqa: PLC0415
    from router.config import find_config, load_config, read_policy  # noqa: PLC0415

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        settings = load_config(find_config(config))
        policy = read_policy(settings)
        if sys.stderr.isatty():
            prepare.prepare_models(settings)
        app.run(settings, policy)
    except TidegateError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(CONFIGURATION_ERROR)


for command in (ask, check, explain, models):
    main.add_command(command)

if __name__ == "__main__":
    main()
