"""Where the resident bytes of a process with a torch model are."""

import psutil


class HostAccount:
    """Takes the process's resident memory apart by what the model is known to hold of it.

    Make it once the model has computed its first token: the code of libraries comes in with it.
    Weights that are mapped from a file count as a whole, though pages that no token has needed yet
    are not resident; when they come in they are seen as `arena`.

    Args:
        weights: Bytes of weights in the machine's own memory; 0 for a model on a GPU.
    """

    def __init__(self, weights: int) -> None:
        self._process = psutil.Process()
        self._weights = min(weights, self._resident())
        self._base = self._resident() - self._weights

    def parts(self, kv: int) -> dict[str, int]:
        """Return the parts, which add up to the resident memory. Takes about 15 µs.

        - `python_and_libraries`: the interpreter, its modules and all libraries' code
        - `weights`: the parameters
        - `kv`: keys and values
        - `arena`: working memory of steps, and whatever requests leave behind

        Args:
            kv: Bytes of keys and values in the machine's own memory.
        """
        resident = self._resident()
        beside = max(0, resident - self._weights - kv)
        base = min(self._base, beside)
        return {
            "python_and_libraries": base,
            "weights": self._weights,
            "kv": kv,
            "arena": beside - base,
        }

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)
