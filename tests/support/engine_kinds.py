"""The engines that there are, and how tests start them."""

from dataclasses import dataclass

from engine_core.models import BUILTIN


@dataclass(frozen=True)
class Kind:
    """One kind of engine and how to start it for tests."""

    module: str
    options: tuple[str, ...]

    @property
    def is_fake(self) -> bool:
        """Whether its answers mean nothing."""
        return self.module == "engine_core.fake_engine"


KINDS = {
    # Slow enough to be caught in the middle of an answer.
    "fake": Kind("engine_core.fake_engine", ("--model", "fake", "--token-delay-ms", "3")),
    "edge": Kind("edge_engine", ("--model", BUILTIN)),
    "cloud": Kind("cloud_engine", ("--model", BUILTIN)),
}
CONTEXT = 1024
