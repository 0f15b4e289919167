"""What a decision sees of a request."""

# ruff: noqa: RUF001 - Chinese punctuation is meant

from time import thread_time
from typing import Any

import pytest

from engine_core.openai import ChatRequest, CompletionRequest, parse_body
from router.decide.view import RequestView, view_chat, view_completion


def chat(*turns: tuple[str, Any], **fields: Any) -> RequestView:
    messages = [{"role": role, "content": content} for role, content in turns]
    return view_chat(parse_body({"model": "auto", "messages": messages, **fields}, ChatRequest))


def completion(prompt: Any, **fields: Any) -> RequestView:
    body = {"model": "auto", "prompt": prompt, **fields}
    return view_completion(parse_body(body, CompletionRequest))


def test_the_ask_is_the_last_human_text() -> None:
    view = chat(
        ("system", "Be brief."),
        ("user", "Prove it."),
        ("assistant", "Done."),
        ("user", "What is the capital of France?"),
        ("assistant", "Let me see."),
    )
    assert view.ask == "What is the capital of France?"


@pytest.mark.parametrize(
    "word", ["yes", "OK, go on!", "Continue.", "继续", "好的，继续。", "...", ""]
)
def test_a_word_that_means_nothing_alone_is_joined_to_the_ask_before(word: str) -> None:
    view = chat(("user", "Prove the theorem."), ("assistant", "First half."), ("user", word))
    assert view.ask.startswith("Prove the theorem.")


@pytest.mark.parametrize("text", ["Thank you", "Go to Paris", "请继续证明第二个引理", "yes " * 20])
def test_a_text_of_its_own_stands_alone(text: str) -> None:
    assert chat(("user", "Prove the theorem."), ("user", text)).ask == text


def test_a_continuation_without_anything_before_stands_alone() -> None:
    assert chat(("user", "continue")).ask == "continue"


def test_without_a_human_the_last_text_is_the_ask() -> None:
    assert chat(("system", "Say hello.")).ask == "Say hello."


def test_text_parts_are_read_as_one_text() -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "wrote it?"}]
    view = chat(("user", parts))
    assert view.ask == "Who wrote it?"
    assert view.needs == frozenset()


@pytest.mark.parametrize(
    ("fields", "need"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "functions"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"n": 2}, "n"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "audio"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"web_search_options": {}}, "web_search"),
    ],
)
def test_fields_that_ask_for_more_than_text_are_needs(fields: dict[str, Any], need: str) -> None:
    assert chat(("user", "Hi"), **fields).needs == {need}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "n": 1, "logprobs": False, "logit_bias": {}},
        {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none"},
        {"tools": [{"type": "function"}], "tool_choice": "none", "moderation": None},
    ],
)
def test_fields_at_their_defaults_need_nothing(fields: dict[str, Any]) -> None:
    assert chat(("user", "Hi"), **fields).needs == frozenset()


@pytest.mark.parametrize(
    ("kind", "need"), [("image_url", "images"), ("input_audio", "audio"), ("file", "images")]
)
def test_parts_that_are_not_text_are_needs(kind: str, need: str) -> None:
    seen = chat(("user", [{"type": "text", "text": "What?"}, {"type": kind}, {"type": kind}]))
    assert seen.needs == {need}
    assert seen.parts == {need: "messages[0].content[1]"}


def test_turns_of_tools_need_tools() -> None:
    assert chat(("user", "Go"), ("tool", "result")).needs == {"tools"}
    assert chat(("user", "Go"), ("function", "result")).needs == {"functions"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}, {"type": "custom"}]},
        {"tools": [{"type": "function"}], "tool_choice": {"type": "allowed_tools"}},
    ],
)
def test_tools_beyond_functions_are_a_need_of_their_own(fields: dict[str, Any]) -> None:
    assert chat(("user", "Hi"), **fields).needs == {"tools", "custom_tools"}


def test_as_many_of_the_best_as_asked_for_are_all() -> None:
    assert completion("Hi", n=2, best_of=2).needs == {"n"}


@pytest.mark.parametrize(
    ("fields", "need"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
    ],
)
def test_a_completion_has_needs_too(fields: dict[str, Any], need: str) -> None:
    assert completion("Hi", **fields).needs == {need}


def test_prompts_of_a_completion_are_counted() -> None:
    assert completion("Once").ask == "Once"
    assert completion([1, 2, 3]) == RequestView(ask="", prompt_tokens=3)
    assert completion(["a", "b"]).needs == {"prompts"}
    assert completion("Once", max_tokens=7).new_tokens == 7


def test_the_newer_token_limit_of_chat_wins() -> None:
    assert chat(("user", "Hi"), max_tokens=5).new_tokens == 5
    assert chat(("user", "Hi"), max_tokens=5, max_completion_tokens=9).new_tokens == 9
    assert chat(("user", "Hi")).new_tokens is None


@pytest.mark.parametrize(
    ("text", "tokens"),
    # Counted with SmolLM2's tokenizer and chat template.
    [
        ("The quick brown fox jumps over the lazy dog. " * 20, 231),
        (
            "你好，我想找家人均消费在100-150元的餐馆吃驴杂汤这道菜，请给我推荐一家餐馆用餐吧。" * 5,
            445,
        ),
    ],
)
def test_the_estimate_of_tokens_is_cautious_but_not_wild(text: str, tokens: int) -> None:
    assert tokens <= chat(("user", text)).prompt_tokens <= 2.5 * tokens


def test_the_estimate_of_a_long_text_follows_its_length() -> None:
    short, long = (chat(("user", "中文文字" * n)).prompt_tokens for n in (250, 250_000))
    assert long == pytest.approx(1000 * short, rel=0.1)


def test_a_view_of_four_million_characters_is_quick() -> None:
    request = parse_body(
        {"model": "auto", "messages": [{"role": "user", "content": "中文 text " * 400_000}]},
        ChatRequest,
    )
    times = []
    for _ in range(20):
        began = thread_time()
        view_chat(request)
        times.append(thread_time() - began)
    assert sorted(times)[10] < 0.010
