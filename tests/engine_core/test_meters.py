"""What an engine counts about itself."""

import re
from pathlib import Path

from engine_core.meters import RATE_WINDOW_SECONDS, Meters, TokenRate
from engine_core.types import EngineStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_is_the_mean_of_the_last_ten_seconds() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    assert rate.per_second() == 0
    for _ in range(50):
        rate.add(2)
        clock.now += 0.1
    assert rate.per_second() == 100 / RATE_WINDOW_SECONDS


def test_rate_forgets_what_is_older() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    rate.add(70)
    clock.now += 9
    rate.add(30)
    assert rate.per_second() == 10
    clock.now += 2
    assert rate.per_second() == 3
    clock.now += 10
    assert rate.per_second() == 0


def test_rate_keeps_few_numbers_however_many_tokens_come() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    for _ in range(50_000):
        rate.add()
        clock.now += 0.001
    assert len(rate._buckets) <= 102
    assert 990 <= rate.per_second() <= 1010


def test_every_field_of_a_reading_is_documented_in_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text("utf-8")
    section = page.partition("\n## Stats\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(EngineStats.__struct_fields__)


def test_reading_holds_the_counters() -> None:
    meters = Meters()
    for ending in ("finished", "cancelled", "failed", "failed"):
        meters.accepted()
        meters.generated()
        meters.cached(5)
        meters.ended(ending)
    stats = meters.read(
        model="m",
        running=1,
        waiting=2,
        kv_used_bytes=3,
        kv_total_bytes=4,
        preempted_total=6,
        memory={"kv": 3},
        details={"device": "x"},
    )
    assert (stats.requests_total, stats.cancelled_total, stats.failed_total) == (4, 1, 2)
    assert stats.generated_tokens_total == 4
    assert stats.tokens_per_second == 0.4
    assert stats.rss_bytes > 1_000_000
    assert stats.uptime_seconds >= 0
    assert (stats.memory, stats.details) == ({"kv": 3}, {"device": "x"})
    assert (stats.cached_prompt_tokens_total, stats.preempted_total) == (20, 6)
