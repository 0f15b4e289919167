"""What the moments at which tokens came say about an engine."""

from itertools import pairwise

from peers.protocol import Times


def first_token_seconds(times: Times) -> float:
    """Return when the last of the sequences had its first token."""
    return max(seen[0] for seen in times)


def decode_rate(times: Times) -> float:
    """Return tokens per second while all sequences generate.

    Counted from when the last sequence has its first token until the first one ends, so neither
    prefill nor a thinning batch is in it. Tokens that came at the opening moment are not counted.

    Raises:
        ValueError: some sequence ended before all had begun.
    """
    begin = first_token_seconds(times)
    end = min(seen[-1] for seen in times)
    if end <= begin:
        raise ValueError("a sequence ended before all of them generated; ask for more tokens")
    return sum(begin < at <= end for seen in times for at in seen) / (end - begin)


def whole_rate(times: Times) -> float:
    """Return tokens per second from the start to the last token, prefill and all."""
    return sum(map(len, times)) / max(seen[-1] for seen in times)


def gaps(times: Times) -> list[float]:
    """Return the seconds between one token and the next of the same sequence."""
    return [after - before for seen in times for before, after in pairwise(seen)]
