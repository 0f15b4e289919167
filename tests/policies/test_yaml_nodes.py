"""The typed YAML reader: what scalars mean, what checks see, and that nothing else comes out."""

from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from policies.errors import YamlProblems
from policies.yaml_nodes import Spot, load, nearest
from policies.yaml_tree import MAX_DEPTH


class Inner(msgspec.Struct, frozen=True):
    number: int | None = None
    flag: bool = False


class Outer(msgspec.Struct, frozen=True):
    text: str = "-"
    count: Annotated[int, Meta(ge=1)] = 1
    ratio: float = 0.5
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    words: tuple[str, ...] = ()
    named: dict[str, Inner] = {}


def read(text: str) -> Outer:
    return load(text, Outer, "f.yaml")


def problems(text: str) -> list[str]:
    with pytest.raises(YamlProblems) as caught:
        read(text)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a comment\n", "\ufeff# byte order mark\n", "{}"]
)
def test_an_empty_document_gives_the_defaults(text: str) -> None:
    assert read(text) == Outer()


@pytest.mark.parametrize(
    "plain", ["on", "off", "yes", "no", "y", "010", "0x10", "0o7", "1:30", "1_000", "2024-01-01"]
)
def test_what_yaml_1_1_would_change_stays_text(plain: str) -> None:
    assert read(f"text: {plain}").text == plain
    assert read(f"words: [{plain}]").words == (plain,)


@pytest.mark.parametrize("plain", ["12", "-1", "0.5", "1e3", "true", "false"])
def test_a_number_or_boolean_where_text_is_expected_must_be_quoted(plain: str) -> None:
    assert "put it in quotes" in problems(f"text: {plain}")[0]
    assert read(f"text: '{plain}'").text == plain


@pytest.mark.parametrize(
    "text", ["inner: {number: }", "inner: {number: null}", "inner: {number: ~}"]
)
def test_nothing_is_none_where_that_is_allowed(text: str) -> None:
    assert read(text).inner.number is None


def test_nothing_is_a_problem_where_a_value_is_expected() -> None:
    assert problems("text:") == ["f.yaml:1:6: expected text, got nothing"]


def test_numbers_keep_their_type() -> None:
    value = read("count: 3\nratio: 1\n")
    assert value.count == 3
    assert (value.ratio, type(value.ratio)) == (1.0, float)


@pytest.mark.parametrize("wrong", ["0", "1.0", "true", "'3'", "99999999999999999999999", "[1]"])
def test_what_is_no_fitting_integer_is_refused(wrong: str) -> None:
    assert problems(f"count: {wrong}")[0].startswith(
        "f.yaml:1:8: expected integer of at least 1, got "
    )


@pytest.mark.parametrize("wrong", [".nan", ".inf", "1e999", "half"])
def test_what_is_no_finite_number_is_refused(wrong: str) -> None:
    assert "expected number, got text" in problems(f"ratio: {wrong}")[0]


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    (line,) = problems(f"count: {'x' * 500}")
    assert len(line) < 120


def test_all_problems_come_at_once_in_the_order_of_the_lines() -> None:
    text = "txt: a\ncount: x\nkind: c\ninner:\n  flg: true\nnamed:\n  n: {number: y}\n"
    places = [line.split(": ")[0] for line in problems(text)]
    assert places == ["f.yaml:1:1", "f.yaml:2:8", "f.yaml:3:7", "f.yaml:5:3", "f.yaml:7:15"]


@pytest.mark.parametrize(
    ("escape", "words"),
    [
        ("\\0", "NUL or for half a character"),
        ("\\ud800", "NUL or for half a character"),
        ("\\U00110000", "stands for no character"),
        ("\\UFFFFFFFF", "stands for no character"),
    ],
)
def test_an_escape_for_what_no_path_or_command_can_hold_is_placed(escape: str, words: str) -> None:
    (problem,) = problems(f'count: 1\ntext: "a{escape}"\n')
    assert problem.startswith("f.yaml:2:")
    assert words in problem


def test_a_control_character_is_placed() -> None:
    assert problems("text: a\ncount: \x00\n") == [
        "f.yaml:2:8: a control character that YAML forbids"
    ]


def test_nesting_is_bounded() -> None:
    deep = MAX_DEPTH + 2
    assert (
        f"nested deeper than {MAX_DEPTH} levels" in problems("words: " + "[" * deep + "]" * deep)[0]
    )


def test_a_check_sees_only_sound_structs_and_reports_at_its_keys() -> None:
    seen = []

    def check(inner: Inner, spot: Spot) -> None:
        seen.append(inner.number)
        assert spot.has("number")
        assert not spot.has("flag")
        spot.problem("no", "number")
        spot.problem("at the struct", "flag")

    with pytest.raises(YamlProblems) as caught:
        load("named:\n  a: {number: x}\n  b: {number: 2}\n", Outer, "f", checks={Inner: check})
    assert seen == [2]
    assert str(caught.value).splitlines() == [
        "f:2:15: expected integer, got text 'x'",
        "f:3:6: at the struct",
        "f:3:7: no",
    ]


def test_a_type_without_a_rule_is_our_own_mistake() -> None:
    class Odd(msgspec.Struct):
        when: bytes = b""

    with pytest.raises(TypeError, match="no rule for"):
        load("when: a", Odd, "f")


def test_the_nearest_valid_word_is_named_or_else_all() -> None:
    assert nearest("polcy", ["policy", "port"]) == "; did you mean 'policy'?"
    assert nearest("zzz", ["policy", "host"]) == "; valid: host, policy"


@given(st.text(alphabet=st.sampled_from("ab: -[]{},'\"\n\t#&*!|>%@?~01.\\é中\x07"), max_size=60))
def test_any_text_gives_a_value_or_placed_problems(text: str) -> None:
    try:
        value = read(text)
    except YamlProblems as error:
        found = error.problems
    else:
        assert isinstance(value, Outer)
        return
    assert found
    assert all(1 <= p.line <= text.count("\n") + 2 and p.column >= 1 for p in found)


@given(
    st.builds(
        Outer,
        text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
        count=st.integers(1, 10**9),
        ratio=st.floats(allow_nan=False, allow_infinity=False),
        kind=st.sampled_from(["a", "b"]),
        words=st.lists(
            st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=10), max_size=3
        ).map(tuple),
    )
)
def test_json_is_read_as_json_reads_it(value: Outer) -> None:
    # PyYAML refuses some characters that JSON leaves raw: all beyond ASCII are escaped here.
    text = msgspec.json.encode(value).decode()
    escaped = "".join(
        c if " " <= c < "\x7f" else "".join(f"\\u{u:04x}" for u in _utf16(c)) for c in text
    )
    if any(c > "\uffff" for c in text):
        return  # YAML has no surrogate pairs
    assert read(escaped) == value


def _utf16(character: str) -> list[int]:
    raw = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]
