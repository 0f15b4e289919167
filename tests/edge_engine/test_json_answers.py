"""A small model at temperature 1 writes valid JSON, a hundred times out of a hundred."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from engine_process import engine_process

from engine_core.models import BUILTIN, ModelFiles

pytestmark = pytest.mark.slow

TOPICS = ("a city", "a song", "a dog", "the sea", "a war", "tea", "Zoë", "your day", "math", "中国")
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 30},
            "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        },
        "required": ["title", "year"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "mood": {"enum": ["good", "bad", None]},
            "score": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
            "tags": {
                "type": "array",
                "items": {"type": "string", "maxLength": 10},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["mood", "score", "tags"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/Node"}},
        "required": ["root"],
        "additionalProperties": False,
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                    "leaf": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/Leaf"}]},
                },
                "required": ["name", "leaf"],
                "additionalProperties": False,
            },
            "Leaf": {
                "type": "object",
                "properties": {"date": {"type": "string", "format": "date"}},
                "required": ["date"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "object",
        "properties": {"a": {"const": "x"}, "b": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def client(builtin_files: ModelFiles) -> Iterator[openai.OpenAI]:
    assert builtin_files.path.exists()
    with engine_process("edge_engine", "--model", BUILTIN, "--context", "1024") as engine:
        engine.wait_until_ready()
        yield openai.OpenAI(
            base_url="http://engine/v1", api_key="none", http_client=engine.http, max_retries=0
        )


def test_a_hundred_answers_parse_and_fit_their_schemas(client: openai.OpenAI) -> None:
    def answer(number: int) -> tuple[dict[str, Any], Any]:
        schema = SCHEMAS[number % len(SCHEMAS)]
        topic = TOPICS[number // len(SCHEMAS) % len(TOPICS)]
        choice = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"Tell me about {topic} in JSON ({number})."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
            temperature=1,
            seed=number,
        ).choices[0]
        assert choice.finish_reason == "stop", choice
        return schema, json.loads(choice.message.content or "")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, range(100)))
    for schema, value in answers:
        jsonschema.validate(value, schema)


def test_any_object_is_an_object(client: openai.OpenAI) -> None:
    for seed in range(10):
        choice = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Describe a cat as JSON."}],
            response_format={"type": "json_object"},
            temperature=1,
            seed=seed,
            max_tokens=400,
        ).choices[0]
        content = choice.message.content or ""
        assert content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content), dict)
