"""Fetch what a first start needs while a person watches, so that they see a progress bar.

The engines fetch and build for themselves too, but they have no terminal to draw on.
"""

import subprocess

from engine_core.errors import ModelError
from engine_core.models import ModelStore
from router.config import Config
from router.engines import build_command


def fetch_models(config: Config) -> None:
    """Download the child engines' models that are not here, and build their edge graphs.

    Raises:
        ModelError: a model cannot be had or built.
    """
    store = ModelStore()
    engines = [t for t in config.targets.values() if t.engine in ("edge", "cloud")]
    absent = {target.model for target in engines if not _is_here(store, target.model)}
    for model in absent:
        store.pull(model)
    for model in absent & {target.model for target in engines if target.engine == "edge"}:
        # The folder that it prints is for scripts; its progress goes to stderr.
        done = subprocess.run(build_command(model), stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise ModelError(f"the edge graph of {model} was not built; the lines above say why")


def _is_here(store: ModelStore, name: str) -> bool:
    try:
        store.find(name)
    except ModelError:
        return False
    return True
