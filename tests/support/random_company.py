"""An answer does not depend on company: alone or beside others, from a prefix or from nothing."""

import asyncio
import random
from collections.abc import Callable

from engine_core.batch_engine import BatchEngine
from engine_core.batch_model import BatchModel
from engine_core.models import ModelFiles
from engine_core.tokenizer import Tokenizer
from engine_core.types import (
    ChatTokenizer,
    FinishEvent,
    GenerationRequest,
    Sampling,
    TextEvent,
)

REQUESTS = 64
TOPICS = (
    "the sea", "a lighthouse keeper", "how bread is baked", "prime numbers", "一只猫", "the moon",
    "a letter to the landlord", "three rules of chess",
)  # fmt: skip
ASKS = ("Write about", "In one sentence, tell me about", "List facts on", "Make a riddle about")


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Return a chat that may share its first turns with others."""
    topic = rng.choice(TOPICS)
    turns = [{"role": "user", "content": f"{rng.choice(ASKS)} {topic}."}]
    if rng.random() < 0.5:
        answer = f"Here is what I know about {topic}: " + "it is larger than it seems, " * 12
        turns += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": rng.choice(("Go on.", "Shorter.", "为什么?")) * 3},
        ]
    return turns


def requests(tokenizer: ChatTokenizer) -> list[GenerationRequest]:
    """Return short chats, half of them drawn with a seed and a filter, some with a past."""
    rng = random.Random(7)
    made = []
    for index in range(REQUESTS):
        sampling = Sampling(temperature=0)
        if index % 2:
            sampling = Sampling(temperature=1.0, top_p=0.95, seed=index)
        made.append(
            GenerationRequest(
                id=str(index),
                prompt_ids=tuple(tokenizer.encode_chat(conversation(rng))),
                max_tokens=rng.randint(4, 24),
                sampling=sampling,
            )
        )
    return made


async def answer(engine: BatchEngine, request: GenerationRequest, salt: str) -> tuple[str, int]:
    """Return the text and how many prompt tokens were found in place."""
    salted = GenerationRequest(
        **{name: getattr(request, name) for name in request.__dataclass_fields__}
        | {"cache_salt": salt}
    )
    text, cached = "", 0
    async for event in engine.generate(salted):
        if isinstance(event, TextEvent):
            text += event.text
        elif isinstance(event, FinishEvent):
            cached = event.usage.cached_tokens
    return text, cached


async def interrupted(engine: BatchEngine, request: GenerationRequest, seconds: float) -> None:
    """Ask and hang up."""
    try:
        async with asyncio.timeout(seconds):
            await answer(engine, request, "shared")
    except TimeoutError:
        pass


async def assert_random_company_changes_no_answer(
    files: ModelFiles, load: Callable[[], BatchModel]
) -> None:
    """Ask the built-in model the same things alone, and among others that come and go.

    Args:
        files: The built-in model's.
        load: Makes what an engine steps.
    """
    engine = BatchEngine(model="m", load=load, tokenizer=Tokenizer.load(files), max_waiting=1000)
    await engine.start()
    try:
        await _compare(engine)
    finally:
        await engine.close()


async def _compare(engine: BatchEngine) -> None:
    asked = requests(engine.tokenizer)
    # A salt of its own: nothing in place to begin from.
    alone = [(await answer(engine, request, request.id))[0] for request in asked]
    rng = random.Random(11)
    tasks = []
    noise = []
    for request in rng.sample(asked, len(asked)):
        tasks.append((request, asyncio.create_task(answer(engine, request, "shared"))))
        if rng.random() < 0.4:
            victim = rng.choice(asked)
            noise.append(asyncio.create_task(interrupted(engine, victim, rng.random() / 2)))
        await asyncio.sleep(rng.random() / 5)
    together = {request.id: await task for request, task in tasks}
    await asyncio.gather(*noise)
    assert [together[request.id][0] for request in asked] == alone
    assert sum(cached for _, cached in together.values()) > 100
    assert len({text for text in alone if text}) > REQUESTS // 2
    assert engine.stats().running == 0
