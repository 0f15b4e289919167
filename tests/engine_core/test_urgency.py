"""The headers that say how much a request matters and until when."""

import pytest

from engine_core.errors import InvalidRequestError
from engine_core.types import PRIORITIES
from engine_core.urgency import Urgency, read_urgency


def test_without_headers_a_request_is_standard_and_never_late() -> None:
    urgency = read_urgency({}, now=5.0)
    assert urgency == Urgency()
    assert urgency.priority == PRIORITIES["standard"]
    assert urgency.headers(now=9.0) == {}


def test_the_deadline_counts_from_the_arrival_and_shrinks_on_the_way() -> None:
    headers = {"x-tidegate-class": "batch", "x-tidegate-deadline-ms": "1500"}
    urgency = read_urgency(headers, now=10.0)
    assert urgency == Urgency("batch", 11.5)
    assert urgency.priority == PRIORITIES["batch"]
    assert urgency.headers(now=10.5) == headers | {"x-tidegate-deadline-ms": "1000"}
    assert urgency.headers(now=11.4999)["x-tidegate-deadline-ms"] == "1"


def test_a_deadline_that_has_just_passed_is_told_as_one_and_not_as_a_wrong_header() -> None:
    assert Urgency("batch", 11.5).headers(now=11.6)["x-tidegate-deadline-ms"] == "1"


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "1e3", "soon", "٣", "9" * 10, " 5"])
def test_a_deadline_is_a_whole_number_above_zero(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-tidegate-deadline-ms") as refusal:
        read_urgency({"x-tidegate-deadline-ms": value}, now=0.0)
    assert refusal.value.param == "x-tidegate-deadline-ms"


@pytest.mark.parametrize("value", ["", "urgent", "Critical", "0"])
def test_an_unknown_class_is_refused_with_the_known_ones(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="critical, standard, sheddable, batch"):
        read_urgency({"x-tidegate-class": value}, now=0.0)
