"""The complexity score: easy and hard, two languages, small changes, time, unknown texts."""

# ruff: noqa: RUF001 - Chinese punctuation is meant

from collections.abc import Callable
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.complexity import HEAD_CHARS, TAIL_CHARS, estimate

# (English, Chinese) of the same request.
EASY = [
    (
        "Hello!",
        "你好！",
    ),
    (
        "Thank you very much.",
        "非常感谢。",
    ),
    (
        "What is the capital of China?",
        "中国的首都是哪里？",
    ),
    (
        "What is the capital of France?",
        "法国的首都是哪里？",
    ),
    (
        "Who wrote Hamlet?",
        "《哈姆雷特》是谁写的？",
    ),
    (
        "When did the Second World War end?",
        "第二次世界大战是什么时候结束的？",
    ),
    (
        "How many days are in a year?",
        "一年有多少天？",
    ),
    (
        "What is the tallest mountain in the world?",
        "世界上最高的山是什么？",
    ),
    (
        "Translate 'good morning' into French.",
        "把“早上好”翻译成法语。",
    ),
    (
        "What does the word photosynthesis mean?",
        "光合作用是什么意思？",
    ),
    (
        "Convert 10 kilometres to miles.",
        "把10公里换算成英里。",
    ),
    (
        "Set an alarm for seven tomorrow morning.",
        "定一个明天早上七点的闹钟。",
    ),
    (
        "What is the weather like in Beijing today?",
        "今天北京的天气怎么样？",
    ),
    (
        "Is there a good restaurant near the station?",
        "车站附近有好的餐馆吗？",
    ),
    (
        "Name three primary colours.",
        "说出三种原色。",
    ),
]
MIDDLING = [
    (
        "Write a short poem about autumn.",
        "写一首关于秋天的短诗。",
    ),
    (
        "Give me some tips for sleeping better.",
        "给我一些改善睡眠的建议。",
    ),
    (
        "Summarize the plot of Romeo and Juliet in one paragraph.",
        "用一段话总结《罗密欧与朱丽叶》的情节。",
    ),
]
HARD = [
    (
        "Prove that the square root of 2 is irrational.",
        "证明根号2是无理数。",
    ),
    (
        "Prove that there are infinitely many prime numbers.",
        "证明素数有无穷多个。",
    ),
    (
        "Prove by induction that the sum of the first n odd numbers is n squared.",
        "用数学归纳法证明前n个奇数之和等于n的平方。",
    ),
    (
        "Let a, b and c be positive real numbers with a + b + c = 1. Find the minimum value of 1/a + 1/b + 1/c and prove your answer.",
        "设a、b、c为正实数，且a + b + c = 1。求1/a + 1/b + 1/c的最小值，并证明你的结论。",
    ),
    (
        "Refactor this Python class into smaller functions, add type hints and write unit tests for every edge case.",
        "把这个Python类重构成更小的函数，加上类型标注，并为每个边界情况编写单元测试。",
    ),
    (
        "Design a distributed rate limiter that handles one million requests per second, explain the trade-offs and describe how it survives the failure of a data centre.",
        "设计一个每秒处理一百万次请求的分布式限流器，解释其中的权衡，并说明它如何在一个数据中心故障时继续工作。",
    ),
    (
        "Compare the economic policies of Keynes and Hayek, analyse their assumptions and evaluate which one explains the crisis of 2008 better.",
        "比较凯恩斯和哈耶克的经济政策，分析他们的假设，并评估哪一个能更好地解释2008年的危机。",
    ),
    (
        "Debug the following deadlock: two threads lock two mutexes in opposite order. Explain why it happens and implement a solution in C++ without a global lock.",
        "调试下面的死锁：两个线程以相反的顺序锁定两个互斥量。解释它为什么发生，并用C++实现一个不使用全局锁的解决方案。",
    ),
    (
        "A train leaves at 9:00 at 80 km/h, and a second one leaves the same station 45 minutes later at 110 km/h. At what time and at what distance does the second train catch up with the first?",
        "一列火车9:00以80公里/小时的速度出发，第二列火车45分钟后从同一车站以110公里/小时的速度出发。第二列火车在什么时间、距离车站多远处追上第一列？",
    ),
    (
        "Write a 1500-word essay that analyses the causes of the French Revolution, compares at least three historians and must not use any direct quotation.",
        "写一篇1500字的文章，分析法国大革命的原因，比较至少三位历史学家的观点，并且不得使用任何直接引文。",
    ),
    (
        "How many positive integers less than 1000 are divisible by 7 but not by 11?",
        "小于1000的正整数中，有多少个能被7整除但不能被11整除？",
    ),
    (
        "Plan a migration of a monolithic application to microservices: list the steps, the risks of each step, and a rollback strategy.",
        "规划一个单体应用向微服务的迁移：列出步骤、每一步的风险以及回滚策略。",
    ),
]

EVERY = [text for pair in EASY + HARD for text in pair]
LONG_REFACTORING = (
    "Refactor the following module. Keep its public interface.\n\n```python\n"
    + "".join(f"def step_{n}(x):\n    return {{'value': x + {n}}}\n" for n in range(60))
    + "```\n"
)


@pytest.mark.parametrize("text", [text for pair in EASY for text in pair])
def test_everyday_questions_are_easy(text: str) -> None:
    complexity = estimate(text)
    assert complexity.score <= 0.25
    assert not complexity.unknown


@pytest.mark.parametrize("text", [*(text for pair in HARD for text in pair), LONG_REFACTORING])
def test_proofs_designs_and_long_tasks_are_hard(text: str) -> None:
    complexity = estimate(text)
    assert complexity.score >= 0.65
    assert not complexity.unknown


@pytest.mark.parametrize(("english", "chinese"), EASY + MIDDLING + HARD)
def test_a_request_scores_alike_in_english_and_chinese(english: str, chinese: str) -> None:
    assert estimate(english).score == pytest.approx(estimate(chinese).score, abs=0.15)


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        str.lower,
        str.title,
        lambda t: f"  {t}\n\n",
        lambda t: t.replace(" ", "   "),
        lambda t: t.replace(" ", "\n"),
        lambda t: t.rstrip(".?!。？！"),
        lambda t: t + "!!!",
        lambda t: t.replace("?", "？").replace(",", "，"),
        lambda t: f'"{t}"',
        lambda t: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in t),
        "\u00ad".join,
        lambda t: "\u202a" + "\u200b".join(t) + "\ufeff",
    ],
    ids=[
        *("upper", "lower", "title", "margins", "wide_spaces", "lines", "no_full_stop"),
        *("exclamation", "chinese_punctuation", "quotes", "full_width"),
        *("soft_hyphens", "zero_width"),
    ],
)
def test_spelling_does_not_change_the_side(change: Callable[[str], str]) -> None:
    for text in EVERY:
        assert (estimate(change(text)).score >= 0.5) == (estimate(text).score >= 0.5), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "?!...",
        "😀😀😀🎉🎉🎉 ok",
        "Какая столица Франции?",
        "ما هي عاصمة فرنسا؟",
        "フランスの首都はどこですか",
        "프랑스의 수도는 어디입니까",
        "Bitte erkläre mir ausführlich den Unterschied zwischen diesen beiden philosophischen Schulen",
    ],
)
def test_what_the_score_does_not_know_is_marked(text: str) -> None:
    assert estimate(text).unknown


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "hi",
        "$$5x+12=52-3x$$",
        "x = {}; y = []; z = (x, y);",
        "best pizza places open late near downtown seattle",
        "Translate 'Quelle est la capitale de la France et pourquoi ?' into English.",
    ],
)
def test_short_and_formal_texts_are_known(text: str) -> None:
    assert not estimate(text).unknown


def test_reasons_are_the_largest_contributions() -> None:
    reasons = estimate("Prove by induction that the sum is n squared.").reasons
    assert reasons[0][0] == "proof or derivation"
    sizes = [abs(value) for _, value in reasons]
    assert sizes == sorted(sizes, reverse=True)
    assert estimate("Name a fruit").reasons == ()


def test_only_the_ends_of_a_long_text_count() -> None:
    ends = "a " * (HEAD_CHARS // 2), "b " * (TAIL_CHARS // 2)
    assert estimate(ends[0] + "prove " * 9 + ends[1]).score == estimate("".join(ends)).score


@given(st.text(max_size=300))
def test_any_text_has_a_score_between_0_and_1(text: str) -> None:
    complexity = estimate(text)
    assert 0 <= complexity.score <= 1
    assert complexity == estimate(text)


@pytest.mark.parametrize(
    "text",
    [
        "Explain the function and compare it. " * 110_000,
        "证明下面的不等式并比较两种方法。" * 250_000,
        "证明 $$x^2 + y$$ 并 explain. " * 150_000,
    ],
    ids=["english", "chinese", "mixed"],
)
def test_any_length_takes_about_a_millisecond(text: str) -> None:
    estimate(text)
    times = []
    for _ in range(50):
        began = thread_time()
        estimate(text)
        times.append(thread_time() - began)
    # The budget is 1 ms; a shared machine is given ten times that.
    assert sorted(times)[25] < 0.010
