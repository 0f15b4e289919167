"""`tidegate check` and `tidegate explain` as an operator sees them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from router.cli_policy import check, explain

BROKEN = Path(__file__).parent / "broken_config"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_CONFIG", raising=False)
    return tmp_path


def run_check(*arguments: str) -> Result:
    return CliRunner().invoke(check, arguments)


def run_explain(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(explain, arguments, input=stdin)


def test_check_of_the_defaults_is_one_line_a_file() -> None:
    result = run_check()
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first == "no configuration file, defaults: ok, targets: edge (edge), cloud (cloud)"
    assert second.endswith("default.yaml: ok, policy 'default', rules: unknown, hard, easy")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("wrong_key", ":3:3: unknown key 'prot'; did you mean 'port'?"),
        ("wrong_type", ":3:9: expected integer"),
        ("bad_indent", ":4:8: not valid YAML"),
    ],
)
def test_check_of_a_broken_file_names_the_line_and_fails(name: str, place: str) -> None:
    path = str(BROKEN / f"{name}.yaml")
    result = run_check("--config", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(path + place)
    assert result.stdout == ""


def test_check_looks_into_the_policy_that_the_configuration_names(empty_folder: Path) -> None:
    (empty_folder / "config.yaml").write_text("policy: mine.yaml\n")
    (empty_folder / "mine.yaml").write_text("version: 1\nname: mine\nrules:\n  - {nme: a}\n")
    result = run_check()
    assert result.exit_code == 1
    assert "config.yaml: ok" in result.stdout
    assert "mine.yaml:4:6: unknown key 'nme'; did you mean 'name'?" in result.stderr
    assert "mine.yaml:4:5: missing key 'to'" in result.stderr


def test_check_of_a_missing_file_says_what_to_do() -> None:
    result = run_check("--config", "absent.yaml")
    assert result.exit_code == 1
    assert "absent.yaml: there is no such file; correct --config" in result.stderr


def test_explain_says_score_rule_candidates_and_change() -> None:
    lines = run_explain("What is the capital of France?").stdout.splitlines()
    assert lines[0].startswith("complexity  0.0")
    assert "  -0.90  simple question" in lines
    assert "rule        easy" in lines
    assert "  edge (edge): tried first" in lines
    assert "  cloud (cloud): tried if those before it fail" in lines
    assert lines[-1].startswith("change      complexity >= 0.5 instead of 0.0")


def test_explain_reads_a_prompt_from_stdin() -> None:
    result = run_explain("-", "--json", stdin="Prove that the square root of 2 is irrational.")
    decision = json.loads(result.stdout)
    assert decision["rule"] == "hard"
    assert decision["chosen"] == ["cloud", "edge"]
    assert decision["complexity"]["score"] > 0.8


def test_explain_shows_what_a_pin_does() -> None:
    output = run_explain("hello", "--model", "cloud").stdout
    assert "rule        model:cloud" in output
    assert "  edge (edge): passed over: the request asks for model 'cloud'" in output


def test_explain_marks_a_text_that_the_score_does_not_know() -> None:
    output = run_explain("Какая столица Франции?").stdout
    assert "unknown kind of text" in output
    assert "rule        unknown" in output


def test_explain_refuses_an_unknown_model() -> None:
    result = run_explain("hello", "--model", "gpt-9")
    assert result.exit_code == 1
    assert "use one of: auto, edge, cloud" in result.stderr
