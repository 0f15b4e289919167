"""config.yaml: its defaults are the program's, it is found where it is said to be, keys are read."""

from pathlib import Path

import msgspec
import pytest

from engine_core.errors import TidegateError
from policies.errors import YamlProblems
from router import config as config_module
from router.config import (
    Config,
    Limits,
    Listen,
    TargetConfig,
    find_config,
    load_config,
    policy_path,
    read_key,
    read_policy,
)

SHIPPED = Path(__file__).parents[2] / "config.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder on a machine without a system-wide configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEGATE_CONFIG", raising=False)
    monkeypatch.setattr(config_module, "SYSTEM_FILE", tmp_path / "etc.yaml")
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def upstream(folder: Path, keys: str) -> Path:
    text = f"targets:\n  p:\n    tier: cloud\n    url: https://example.com/v1\n    model: m\n{keys}"
    return write(folder / "config.yaml", text)


def test_the_shipped_file_says_the_defaults() -> None:
    assert load_config(SHIPPED) == load_config(None) == Config()


@pytest.mark.parametrize("struct", [Config, Listen, Limits, TargetConfig])
def test_the_shipped_file_shows_every_key(struct: type[msgspec.Struct]) -> None:
    lines = [line.strip(" #") for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    for field in struct.__struct_fields__:
        assert any(line.startswith(f"{field}:") for line in lines), field


def test_an_empty_file_means_the_defaults(folder: Path) -> None:
    assert load_config(write(folder / "c.yaml", "")) == Config()


def test_files_are_looked_for_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config(None) is None
    system = write(folder / "etc.yaml", "")
    assert find_config(None) == system
    write(folder / "config.yaml", "")
    assert find_config(None) == Path("config.yaml")
    named = write(folder / "named.yaml", "")
    monkeypatch.setenv("TIDEGATE_CONFIG", str(named))
    assert find_config(None) == named
    given = write(folder / "given.yaml", "")
    assert find_config(given) == given


def test_a_file_that_was_asked_for_must_exist(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TidegateError, match="there is no such file; correct --config"):
        find_config(folder / "absent.yaml")
    monkeypatch.setenv("TIDEGATE_CONFIG", "absent.yaml")
    with pytest.raises(TidegateError, match="there is no such file; correct TIDEGATE_CONFIG"):
        find_config(None)


def test_a_file_that_cannot_be_looked_at_is_named_when_it_is_read(folder: Path) -> None:
    name = folder / ("x" * 300)
    with pytest.raises(TidegateError, match="cannot be read: File name too long"):
        load_config(find_config(name))


def test_an_unreadable_file_is_named(folder: Path) -> None:
    with pytest.raises(TidegateError, match="cannot be read: Is a directory"):
        load_config(folder)
    (folder / "c.yaml").write_bytes(b"listen: \xff")
    with pytest.raises(TidegateError, match="cannot be read: it is not UTF-8 text"):
        load_config(folder / "c.yaml")


def test_paths_are_relative_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "my.yaml", "version: 1\nname: mine\nrules:\n  - {name: all, to: [p]}\n")
    write(folder / "key", "secret\n").chmod(0o600)
    upstream(folder, "    key_file: key\npolicy: my.yaml\n")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("../config.yaml"))
    assert read_policy(config).name == "mine"
    assert read_key(config.targets["p"]) == "secret"


def test_the_packaged_policy_is_used_if_none_is_named() -> None:
    assert policy_path(Config()).name == "default.yaml"
    assert read_policy(Config()).name == "default"


def test_a_policy_is_checked_against_the_targets(folder: Path) -> None:
    path = write(
        folder / "my.yaml", "version: 1\nname: n\nrules:\n  - {name: all, to: [prvider]}\n"
    )
    config = load_config(upstream(folder, "policy: my.yaml\n"))
    with pytest.raises(
        YamlProblems, match=r"4:22: no tier or target is called 'prvider'"
    ) as caught:
        read_policy(config)
    assert str(caught.value).startswith(str(path))


def test_a_missing_policy_says_what_to_do(folder: Path) -> None:
    config = load_config(upstream(folder, "policy: absent.yaml\n"))
    with pytest.raises(TidegateError, match=r"absent.yaml: there is no such file; create it or"):
        read_policy(config)


def test_a_models_path_is_relative_to_the_file_and_a_hub_name_is_no_path(folder: Path) -> None:
    (folder / "models" / "tiny").mkdir(parents=True)
    (folder / "big.gguf").touch()
    names = {"a": "models/tiny", "b": "./big.gguf", "c": "org/name@main", "d": str(folder)}
    text = "targets:\n" + "".join(
        f"  {key}: {{tier: edge, engine: edge, model: '{name}'}}\n" for key, name in names.items()
    )
    targets = load_config(write(folder / "c.yaml", text)).targets
    assert [Path(targets[key].model) for key in "abd"] == [
        folder / "models" / "tiny",
        folder / "big.gguf",
        folder,
    ]
    assert targets["c"].model == "org/name@main"


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.2"])
def test_every_loopback_address_may_be_listened_on(folder: Path, host: str) -> None:
    config = load_config(write(folder / "c.yaml", f"listen: {{host: '{host}', port: 0}}\n"))
    assert config.listen == Listen(host, 0)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "http://127.0.0.1:8000/v1",
        "http://localhost/v1",
        "http://[::1]:8000/v1",
    ],
)
def test_https_and_local_http_upstreams_are_taken(folder: Path, url: str) -> None:
    text = f"targets: {{p: {{tier: cloud, model: m, url: '{url}'}}}}\n"
    assert load_config(write(folder / "c.yaml", text)).targets["p"].url == url


def test_http_to_another_machine_needs_consent(folder: Path) -> None:
    text = "targets: {p: {tier: cloud, model: m, url: 'http://gpu.lan/v1', insecure: true}}\n"
    assert load_config(write(folder / "c.yaml", text)).targets["p"].insecure


def test_a_key_file_that_others_may_read_is_refused(folder: Path) -> None:
    write(folder / "key", "secret").chmod(0o640)
    with pytest.raises(YamlProblems, match="other users may read this key; chmod 600"):
        load_config(upstream(folder, "    key_file: key\n"))


def test_keys_come_from_a_variable_or_from_nowhere(folder: Path) -> None:
    target = load_config(upstream(folder, "    key_env: PROVIDER_KEY\n")).targets["p"]
    assert read_key(target, {"PROVIDER_KEY": " secret\n"}) == "secret"
    assert read_key(load_config(upstream(folder, "")).targets["p"], {}) is None


@pytest.mark.parametrize("value", ["", "   ", "two\nlines", "schlüssel"])
def test_what_cannot_be_a_key_is_refused_without_repeating_it(folder: Path, value: str) -> None:
    target = load_config(upstream(folder, "    key_env: PROVIDER_KEY\n")).targets["p"]
    with pytest.raises(TidegateError, match=r"\$PROVIDER_KEY holds no usable key") as caught:
        read_key(target, {"PROVIDER_KEY": value} if value else {})
    assert "lines" not in str(caught.value)
    assert "schl" not in str(caught.value)


def test_the_targets_keep_the_order_of_the_file(folder: Path) -> None:
    text = "targets:\n" + "".join(
        f"  {name}: {{tier: edge, engine: edge, model: a/m}}\n" for name in ("z", "a", "m")
    )
    assert list(load_config(write(folder / "c.yaml", text)).tiers()) == ["z", "a", "m"]
