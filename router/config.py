"""config.yaml: typed, every key checked, every problem with its line. Read once, at the start."""

import os
import re
import stat
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from engine_core.errors import ModelError, TidegateError
from engine_core.ladder import DEFAULT_LADDER, Ladder
from engine_core.machine_limits import threads_fault
from engine_core.memory_size import STEP_LEAST, MemorySize
from engine_core.model_names import is_local, local_path
from engine_core.model_names import name_fault as model_fault
from engine_core.models import BUILTIN
from policies.policy import TIERS, Policy, load_policy, name_fault
from policies.yaml_nodes import Checks, Spot, load
from router.addresses import is_loopback, url_fault
from router.decide.decision import AUTO

ENVIRONMENT = "TIDEGATE_CONFIG"
SYSTEM_FILE = Path("/etc/tidegate/config.yaml")
MIB = 1024 * 1024

_EDGE_ENGINE_ONLY = ("slots", "kv", "step_memory")
_CLOUD_ENGINE_ONLY = ("max_running", "device", "dtype", "weights", "graphs", "ladder")
_ENGINE_ONLY = (
    "threads",
    "max_waiting",
    "kv_memory",
    *_EDGE_ENGINE_ONLY,
    *_CLOUD_ENGINE_ONLY,
)
_URL_ONLY = ("key_file", "key_env", "insecure")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
"""Capitals only: many keys (`hf_…`, `gsk_…`) would pass for a name in small letters."""
_KEY_HINT = (
    "a key never stands in this file; name its file in 'key_file' or its variable in 'key_env'"
)

Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class Listen(msgspec.Struct, frozen=True):
    """Where clients reach the daemon. Port 0 lets the system choose."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080


class Limits(msgspec.Struct, frozen=True):
    """What the door refuses."""

    max_body_bytes: Annotated[int, Meta(ge=1024, le=64 * MIB)] = 4 * MIB


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can answer: a child engine (`engine`) or an OpenAI-compatible server (`url`).

    `context` is in tokens; None means the model's own window (engine) or unknown (url).
    `threads`, `slots`, `kv_memory` and `step_memory` None leave the number to the engine.
    """

    tier: Literal["edge", "cloud"]
    engine: Literal["edge", "cloud", "fake"] | None = None
    url: Text | None = None
    model: Text
    context: Annotated[int, Meta(ge=16, le=16 * MIB)] | None = None
    threads: Count | None = None
    max_waiting: Count = 64
    slots: Count | None = None
    kv: Literal["float32", "int8"] = "float32"
    kv_memory: MemorySize | None = None
    step_memory: MemorySize | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "int8", "int8-all"] = "auto"
    max_running: Count | None = None
    graphs: Literal["auto", "off"] = "auto"
    ladder: Ladder = DEFAULT_LADDER
    key_file: Text | None = None
    key_env: Text | None = None
    insecure: bool = False


def _default_targets() -> dict[str, TargetConfig]:
    return {
        "edge": TargetConfig(tier="edge", engine="edge", model=BUILTIN),
        "cloud": TargetConfig(tier="cloud", engine="cloud", model=BUILTIN),
    }


class Config(msgspec.Struct, frozen=True):
    """The whole file. Paths in it are absolute after loading."""

    listen: Listen = Listen()
    policy: str = ""
    """The policy file; empty means the packaged default."""
    drain_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a stopping daemon lets running answers finish."""
    limits: Limits = Limits()
    targets: Annotated[dict[str, TargetConfig], Meta(min_length=1)] = msgspec.field(
        default_factory=_default_targets
    )

    def tiers(self) -> dict[str, str]:
        """Return the tier of each target by name, in the order of the file."""
        return {name: target.tier for name, target in self.targets.items()}


def find_config(given: Path | None) -> Path | None:
    """Return the file to load, or None if the defaults apply.

    The first of: `given` (from `--config`), `TIDEGATE_CONFIG`, `config.yaml` in the current folder,
    `/etc/tidegate/config.yaml`. The first two must exist when they are set.

    Raises:
        TidegateError: a file that was asked for is not there.
    """
    asked = given or (Path(name) if (name := os.environ.get(ENVIRONMENT)) else None)
    if asked is not None:
        if not _is_there(asked):
            origin = "--config" if given else ENVIRONMENT
            raise TidegateError(
                f"{asked}: there is no such file; correct {origin}, or leave it out to use "
                f"./config.yaml, {SYSTEM_FILE} or the built-in defaults"
            )
        return asked
    return next((path for path in (Path("config.yaml"), SYSTEM_FILE) if _is_there(path)), None)


def load_config(path: Path | None) -> Config:
    """Read and check a configuration file; None gives the defaults.

    Raises:
        YamlProblems: everything that is wrong, at once.
        TidegateError: the file cannot be read.
    """
    if path is None:
        return Config()
    folder = path.absolute().parent

    def check_target(target: TargetConfig, spot: Spot) -> None:
        _check_target(target, spot, folder)

    checks: Checks = {
        Listen: _check_listen,
        TargetConfig: check_target,
        Config: _check_names,
    }
    hints = dict.fromkeys(("key", "api_key", "apikey", "token", "secret", "password"), _KEY_HINT)
    config = load(_read(path), Config, str(path), checks=checks, unknown_hints=hints)
    targets = {name: _with_full_paths(target, folder) for name, target in config.targets.items()}
    policy = str(folder / config.policy) if config.policy else ""
    return msgspec.structs.replace(config, policy=policy, targets=targets)


def policy_path(config: Config) -> Path:
    """Return the file of the policy in force."""
    return Path(config.policy or str(resources.files("policies") / "default.yaml"))


def read_policy(config: Config) -> Policy:
    """Read the policy that the configuration names and check it against the targets.

    Raises:
        YamlProblems: everything that is wrong, at once.
        TidegateError: the file cannot be read.
    """
    path = policy_path(config)
    return load_policy(_read(path), str(path), config.tiers())


def read_key(target: TargetConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key for a `url` target, or None if it needs none.

    Raises:
        TidegateError: the named file or variable holds no key.
    """
    if target.key_file is not None:
        key, origin = _read(Path(target.key_file)).strip(), f"the file {target.key_file}"
    elif target.key_env is not None:
        key, origin = environment.get(target.key_env, "").strip(), f"${target.key_env}"
    else:
        return None
    if not key or not key.isascii() or not key.isprintable():
        raise TidegateError(f"{origin} holds no usable key; put the key of {target.url} there")
    return key


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return True  # in a folder that this user may not enter, say: reading it tells why


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TidegateError(
            f"{path}: there is no such file; create it or correct the path"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TidegateError(f"{path}: cannot be read: {reason}") from None


def _check_listen(listen: Listen, spot: Spot) -> None:
    if not is_loopback(listen.host):
        spot.problem(
            f"'{listen.host}' is open to the network, but there is no login; use 127.0.0.1, ::1 or "
            "localhost, and put a proxy that checks keys in front for other machines",
            "host",
        )


def _check_target(target: TargetConfig, spot: Spot, folder: Path) -> None:
    if target.engine is not None and target.url is not None:
        spot.problem("a target has either 'engine' or 'url', not both", "url")
        return
    if target.engine is None and target.url is None:
        spot.problem("a target needs 'engine' (edge, cloud) or 'url' (http://… or https://…)")
        return
    kind, foreign = ("engine", _URL_ONLY) if target.engine else ("url", _ENGINE_ONLY)
    other = "url" if target.engine else "engine"
    for key in filter(spot.has, foreign):
        spot.problem(f"'{key}' belongs to a target with '{other}', and this one has '{kind}'", key)
    for engine, keys in (("edge", _EDGE_ENGINE_ONLY), ("cloud", _CLOUD_ENGINE_ONLY)):
        if target.engine and target.engine != engine:
            for key in filter(spot.has, keys):
                spot.problem(f"'{key}' is only for engine: {engine}", key)
    _check_machine(target, spot)
    if target.engine in ("edge", "cloud"):
        _check_model(target, spot, folder)
    if target.url and (fault := url_fault(target.url, insecure=target.insecure)):
        spot.problem(fault, "url")
    _check_key(target, spot, folder)


def _check_machine(target: TargetConfig, spot: Spot) -> None:
    """Check what a child engine asks of this machine, as the engine will when it starts."""
    # What a GPU has only its engine knows.
    on_host = target.engine != "cloud" or target.device == "cpu"
    if on_host and target.kv_memory and (fault := target.kv_memory.fault()):
        spot.problem(fault, "kv_memory")
    if target.step_memory and (fault := target.step_memory.fault(least=STEP_LEAST)):
        spot.problem(fault, "step_memory")
    if target.threads and (fault := threads_fault(target.threads)):
        spot.problem(fault, "threads")


def _check_model(target: TargetConfig, spot: Spot, folder: Path) -> None:
    """Check what can be known of a child engine's model without a network."""
    if is_local(target.model, folder):
        try:
            if not local_path(target.model, folder).exists():
                spot.problem("there is no such file or folder", "model")
        except ModelError as error:
            spot.problem(str(error), "model")
        except OSError as error:
            spot.problem(f"it cannot be read: {error.strerror}", "model")
    elif fault := model_fault(target.model):
        spot.problem(fault, "model")


def _with_full_paths(target: TargetConfig, folder: Path) -> TargetConfig:
    if target.key_file:
        target = msgspec.structs.replace(target, key_file=str(folder / target.key_file))
    if target.engine in ("edge", "cloud") and is_local(target.model, folder):
        target = msgspec.structs.replace(target, model=str(local_path(target.model, folder)))
    return target


def _check_key(target: TargetConfig, spot: Spot, folder: Path) -> None:
    if target.key_file and target.key_env:
        spot.problem("a target has either 'key_file' or 'key_env', not both", "key_env")
        return
    if target.key_env and not _VARIABLE.fullmatch(target.key_env):
        # The value may be a key pasted into the wrong place: not repeated.
        spot.problem(
            "expected the name of an environment variable in capitals, not the key itself",
            "key_env",
        )
    if target.key_file:
        try:
            mode = (folder / target.key_file).stat().st_mode
        except (OSError, ValueError):  # too long for a name, perhaps
            mode = 0
        if not stat.S_ISREG(mode):
            # The same: a pasted key must not reach the log.
            spot.problem("there is no such file; write the key into it and chmod 600", "key_file")
        elif stat.S_IMODE(mode) & 0o077:
            spot.problem("other users may read this key; chmod 600 the file", "key_file")


def _check_names(config: Config, spot: Spot) -> None:
    for name, target in config.targets.items():
        if name == AUTO or (name in TIERS and name != target.tier):
            meaning = "let the policy choose" if name == AUTO else f"the {name} tier"
            spot.problem(
                f"clients ask for model '{name}' to mean: {meaning}; rename this target",
                "targets",
                name,
            )
        elif fault := name_fault(name):
            spot.problem(fault, "targets", name)
