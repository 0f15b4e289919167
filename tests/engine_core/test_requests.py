"""What a body of each endpoint asks of an engine."""

from engine_core.fake_engine import FakeEngine
from engine_core.requests import read_chat, read_completion


def test_a_plain_completion_continues_its_prompt_and_a_chat_answer_begins_a_text() -> None:
    engine = FakeEngine()
    completion = read_completion(b'{"model": "m", "prompt": "The capital is"}', engine)
    chat = read_chat(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}', engine)

    assert completion.generation.continues
    assert not chat.generation.continues
