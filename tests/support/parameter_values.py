"""For every parameter of OpenAI's endpoints, fields of a body that ask for something with it."""

from typing import Any

_TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}
_SCHEMA = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}

_BOTH: dict[str, dict[str, Any]] = {
    "cache_salt": {"cache_salt": "tenant-1"},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": -100}},
    "max_tokens": {"max_tokens": 3},
    "min_p": {"min_p": 0.05},
    "model": {"model": "another"},
    "n": {"n": 2},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "seed": {"seed": 7},
    "stop": {"stop": ["\n\n", "zzz"]},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "user": {"user": "u"},
}

CHAT_VALUES: dict[str, dict[str, Any]] = _BOTH | {
    "audio": {"audio": {"voice": "alloy", "format": "wav"}},
    "function_call": {"function_call": {"name": "now"}},
    "functions": {"functions": [{"name": "now"}]},
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "messages": {"messages": [{"role": "developer", "content": "Be brief."}]},
    "metadata": {"metadata": {"a": "b"}},
    "modalities": {"modalities": ["text", "audio"]},
    "moderation": {"moderation": {"model": "omni"}},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "prompt_cache_options": {"prompt_cache_options": {"mode": "explicit"}},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "reasoning_effort": {"reasoning_effort": "low"},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": _SCHEMA},
        }
    },
    "safety_identifier": {"safety_identifier": "s"},
    "service_tier": {"service_tier": "flex"},
    "store": {"store": True},
    "tool_choice": {"tools": [_TOOL], "tool_choice": "auto"},
    "tools": {"tools": [_TOOL]},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "verbosity": {"verbosity": "low"},
    "web_search_options": {"web_search_options": {}},
}

COMPLETION_VALUES: dict[str, dict[str, Any]] = _BOTH | {
    "best_of": {"best_of": 2},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "prompt": {"prompt": [72, 105]},
    "suffix": {"suffix": "x"},
}

NEEDED = {"response_format": "json", "tools": "tools", "tool_choice": "tools"}
"""Capabilities without which a supported parameter is refused."""
