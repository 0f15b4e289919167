"""The engines of other people that ours is compared with, and where `make peers` puts them."""

from dataclasses import dataclass
from pathlib import Path

from engine_core.models import BUILTIN

_HERE = Path(__file__).parent
PROGRAMS = _HERE / "peers"
ROOT = _HERE.parent / ".peers"

_LABEL = BUILTIN.partition(":")[2]
Q8_0 = ROOT / "models" / f"{_LABEL}-Q8_0.gguf"
GENAI = ROOT / "models" / f"{_LABEL}-ortgenai-int8"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in an environment of its own.

    Args:
        name: Of its requirements file and worker program in `peers/`, and in results.
        model: What it runs: the built-in model's weights in the peer's own 8-bit form.
        cost: What installing it takes, for the person who waits.
    """

    name: str
    model: Path
    cost: str

    @property
    def folder(self) -> Path:
        """The environment."""
        return ROOT / self.name

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def program(self) -> Path:
        """The worker, which speaks `peers/protocol.py`."""
        return PROGRAMS / f"{self.name}_worker.py"

    @property
    def requirements(self) -> Path:
        """What to install."""
        return PROGRAMS / f"{self.name}.txt"

    @property
    def installed_requirements(self) -> Path:
        """A copy of `requirements`, written when all of them are installed."""
        return self.folder / "requirements.txt"

    @property
    def installed(self) -> bool:
        """Whether the environment has what `requirements` asks for today."""
        copy = self.installed_requirements
        return copy.exists() and copy.read_bytes() == self.requirements.read_bytes()

    @property
    def ready(self) -> bool:
        """Whether it can be measured."""
        return self.installed and self.model.exists()


PEERS = (
    Peer("llamacpp", Q8_0, "compiles, about 8 minutes on 2 cores"),
    Peer("ortgenai", GENAI, "1.5 GB"),
    Peer("openvino", Q8_0, "0.3 GB"),
)
