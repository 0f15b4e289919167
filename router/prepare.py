"""Fetch and build what a start needs while a person watches, so that they see a progress bar.

The engines fetch and build for themselves too, but they have no terminal to draw on.
"""

import subprocess

from engine_core.downloads import say
from engine_core.errors import ModelError
from engine_core.models import ModelStore
from router.config import Config
from router.engines import run_build


def prepare_models(config: Config) -> None:
    """Download the child engines' models that are not here, and build their edge graphs.

    What cannot be had is said and left to the engine that needs it, which tries again: the other
    targets answer meanwhile.
    """
    edge = [
        (target.model, target.kv) for target in config.targets.values() if target.engine == "edge"
    ]
    cloud = [target.model for target in config.targets.values() if target.engine == "cloud"]
    for name, kv in dict.fromkeys(edge):
        # It fetches too, and says on stderr what is wrong. The folder that it prints is for scripts.
        run_build(name, kv=kv, stdout=subprocess.DEVNULL)
    store = ModelStore()
    for name in dict.fromkeys(cloud):
        if name not in dict(edge):
            try:
                store.pull(name)
            except ModelError as error:
                say(f"error: {error}")
