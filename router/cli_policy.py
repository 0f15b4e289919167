"""`tidegate check` and `tidegate explain`: what the files say, and what they do with a prompt."""

import sys
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from engine_core.errors import TidegateError
from engine_core.openai import ChatRequest, Message
from router.cli_options import config_option, prompt_text
from router.config import Config, find_config, load_config, policy_path, read_policy
from router.decide.decision import AUTO, Decision, TargetInfo, decide
from router.decide.view import view_chat


@click.command()
@config_option
def check(config: Path | None) -> None:
    """Check the configuration and its policy; exit 1 and name every problem if there is one."""
    try:
        path = find_config(config)
        settings = load_config(path)
        targets = ", ".join(f"{name} ({tier})" for name, tier in settings.tiers().items())
        click.echo(f"{path or 'no configuration file, defaults'}: ok, targets: {targets}")
        policy = read_policy(settings)
    except TidegateError as error:
        _fail(error)
    rules = ", ".join(rule.name for rule in policy.rules)
    click.echo(f"{policy_path(settings)}: ok, policy '{policy.name}', rules: {rules}")


@click.command()
@click.argument("prompt")
@click.option("--model", default=AUTO, show_default=True, help="The model name to ask for.")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the decision as one JSON line.")
def explain(prompt: str, model: str, config: Path | None, as_json: bool) -> None:
    """Show where PROMPT would go and why, without running it; - reads it from stdin.

    Every configured target is taken to be ready.
    """
    text = prompt_text(prompt)
    try:
        settings = load_config(find_config(config))
        request = ChatRequest(model=model, messages=[Message(role="user", content=text)])
        decision = decide(
            view_chat(request), model, read_policy(settings), _all_ready(settings), "explain"
        )
    except TidegateError as error:
        _fail(error)
    if as_json:
        shown = msgspec.to_builtins(decision) | {"chosen": decision.chosen}
        click.echo(msgspec.json.encode(shown).decode())
    else:
        click.echo(_in_words(decision))


def _all_ready(config: Config) -> list[TargetInfo]:
    return [
        TargetInfo(
            name=name,
            tier=target.tier,
            ready=True,
            context_window=target.context,
        )
        for name, target in config.targets.items()
    ]


def _in_words(decision: Decision) -> str:
    complexity = decision.complexity
    known = "unknown kind of text" if complexity.unknown else "from 0 (easy) to 1 (hard)"
    lines = [f"complexity  {complexity.score:.2f}  ({known})"]
    lines += [f"  {value:+.2f}  {name}" for name, value in complexity.reasons]
    lines += [f"rule        {decision.rule}", "candidates"]
    turn = "tried first"
    for candidate in decision.candidates:
        why = f"passed over: {candidate.passed_over}" if candidate.passed_over else turn
        lines.append(f"  {candidate.target} ({candidate.tier}): {why}")
        turn = turn if candidate.passed_over else "tried if those before it fail"
    lines.append(f"change      {decision.changed_by}")
    return "\n".join(lines)


def _fail(error: TidegateError) -> NoReturn:
    click.echo(str(error), err=True)
    sys.exit(1)
