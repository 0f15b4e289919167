"""`tidegate models` as a person types it."""

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine_core.models import BUILTIN, ModelFiles
from router import cli, cli_models
from router.cli_models import models


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "store"))
    return tmp_path / "store"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(models, arguments)


@pytest.mark.slow
def test_pull_list_rm(builtin_files: ModelFiles, root: Path) -> None:
    pulled = run("pull", "--from", str(builtin_files.path))
    listed = run("list")
    removed = run("rm", BUILTIN)

    path = root / "models" / "builtin" / "smollm2-135m-instruct"
    assert pulled.exit_code == 0, pulled.output
    assert pulled.stdout.strip() == str(path / builtin_files.path.name)
    assert listed.stdout.split() == ["model", BUILTIN, "98", "MB", str(path)]
    assert removed.stdout == f"removed {path}\n"
    assert not path.exists()


def test_an_empty_store_says_how_to_fill_it(root: Path) -> None:
    result = run("list")

    assert result.exit_code == 0
    assert result.stdout == (f"No models in {root}. Fetch the built-in one: tidegate models pull\n")


def test_a_wrong_name_is_one_line_and_a_failure() -> None:
    result = run("pull", "no-such-form")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: 'no-such-form' is not a model's name.")
    assert "Traceback" not in result.output


def test_removing_what_is_not_there_is_a_failure() -> None:
    result = run("rm", "org/model")

    assert result.exit_code == 1
    assert "tidegate models list" in result.stderr


def test_rm_wants_a_name() -> None:
    assert run("rm").exit_code == 2


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (-9, 1)])
def test_build_runs_the_edge_builder_and_passes_its_exit_code_on(
    monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    builds: list[tuple[str, ...]] = []

    def fake_build(model: str, precision: str, kv: str) -> int:
        builds.append((model, precision, kv))
        return code

    monkeypatch.setattr(cli_models, "run_build", fake_build)

    result = run("build", "org/model", "--precision", "fp32", "--kv", "int8")

    assert result.exit_code == expected
    assert builds == [("org/model", "fp32", "int8")]


def test_ctrl_c_ends_a_command_as_a_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_pull(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_models.ModelStore, "pull", fake_pull)
    done = CliRunner().invoke(cli.main, ["models", "pull"])

    assert done.exit_code == 128 + signal.SIGINT
    assert done.output == ""
