"""Every number that an engine says about itself is a metric; no text becomes one."""

from router.observe.metrics import Metrics


def lines(metrics: Metrics) -> list[str]:
    text = metrics.render().decode()
    return [line for line in text.splitlines() if line.startswith("tidegate_engine_")]


def test_fields_parts_and_details_are_told_for_each_target() -> None:
    metrics = Metrics()
    metrics.engine_stats(
        "cloud",
        {
            "model": "m",
            "running": 3,
            "requests_total": 7,
            "memory": {"kv": 10, "weights": 20},
            "details": {"device": "cuda:0", "eager_steps_total": 2, "graph_hits_8": 5, "on": True},
        },
    )
    metrics.engine_stats("edge", {"running": 1, "memory": {}, "details": {}})
    assert lines(metrics) == [
        'tidegate_engine_running{target="cloud"} 3.0',
        'tidegate_engine_running{target="edge"} 1.0',
        'tidegate_engine_requests_total{target="cloud"} 7.0',
        'tidegate_engine_memory_bytes{part="kv",target="cloud"} 10.0',
        'tidegate_engine_memory_bytes{part="weights",target="cloud"} 20.0',
        'tidegate_engine_eager_steps_total{target="cloud"} 2.0',
        'tidegate_engine_graph_hits_total{size="8",target="cloud"} 5.0',
        'tidegate_engine_on{target="cloud"} 1.0',
    ]


def test_an_engine_that_is_down_says_nothing() -> None:
    metrics = Metrics()
    metrics.engine_stats("edge", {"running": 1})
    metrics.engine_stats("edge", None)
    assert lines(metrics) == []


def test_what_is_no_number_or_no_name_is_left_out() -> None:
    metrics = Metrics()
    metrics.engine_stats(
        "edge", {"running": "many", "Bad Name{}": 1, "details": None, "waiting": None}
    )
    assert lines(metrics) == []


def test_what_no_float_holds_is_left_out() -> None:
    metrics = Metrics()
    metrics.engine_stats(
        "edge", {"memory": {"kv": "all", "arena": None, "weights": 2}, "running": 10**400}
    )
    assert lines(metrics) == ['tidegate_engine_memory_bytes{part="weights",target="edge"} 2.0']


def test_no_sample_is_told_twice_or_with_other_labels() -> None:
    metrics = Metrics()
    metrics.engine_stats(
        "a",
        {
            "running": 1,
            "memory": {"kv": 2},
            "details": {"running": 3, "memory_bytes": 4, "hits_8": 5, "hits_total": 6},
        },
    )
    metrics.engine_stats("b", {"hits_total": 7, "running": 8})
    assert lines(metrics) == [
        'tidegate_engine_running{target="a"} 1.0',
        'tidegate_engine_running{target="b"} 8.0',
        'tidegate_engine_memory_bytes{part="kv",target="a"} 2.0',
        'tidegate_engine_hits_total{size="8",target="a"} 5.0',
    ]
