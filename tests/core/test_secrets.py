from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import quote

import click
import pytest
from structlog.testing import capture_logs

from reasonrag.cli import Redacted
from reasonrag.core.config import load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.text import find_secrets, redact, redact_data

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MIXED = "aB3dE5fG7hJ9kL2mN4pQ6rS8tU0vW1xY3zA5bC7d"  # 40 characters, as generators mix them
ID = "Q3EGRWZB7XKLMN2P"
JWT = ".".join(
    base64.urlsafe_b64encode(part).decode().rstrip("=")
    for part in (b'{"alg":"HS256"}', b'{"sub":"1234"}', b"\x9a" * 32)
)
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{MIXED}\n{MIXED}\nQUJD\n-----END RSA PRIVATE KEY-----"

TOKENS = {
    "hugging_face": f"hf_{MIXED[:34]}",
    "openai": f"sk-proj-{MIXED}_-{MIXED}",
    "openai of old": f"sk-{MIXED}{MIXED[:8]}",
    "anthropic": f"sk-ant-api03-{MIXED}-{MIXED}AA",
    "github": f"ghp_{MIXED[:36]}",
    "github, of an app": f"ghs_{MIXED[:36]}",
    "github, fine-grained": f"github_pat_{MIXED[:22]}_{MIXED}",
    "api_key": f"gsk_{MIXED}",
    "api_key of xAI": f"xai-{MIXED}",
    "gitlab": f"glpat-{MIXED[:20]}",
    "aws": f"AKIA{ID}",
    "aws, for a while": f"ASIA{ID}",
    "google": f"AIza{MIXED[:35]}",
    "slack": f"xoxb-123456789012-{MIXED[:24]}",
    "wandb": f"wandb_v1_{MIXED}",
    "jwt": JWT,
    "private_key": PEM,
}


@pytest.fixture(autouse=True)
def _no_secret_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "GITHUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("around", ["{}", "see {}, and more", "<query>{}</query>", "a\\n{}\\n", "%20{}%20", "k={}&x=1"])
def test_a_token_is_known_by_its_shape_wherever_it_stands(name: str, around: str) -> None:
    text = around.format(TOKENS[name])
    assert redact(text) == around.format("***")
    assert {secret.kind for secret in find_secrets(text)} <= {name.partition(",")[0].partition(" ")[0], "assignment"}


@pytest.mark.parametrize(
    "shown",
    [
        "Authorization: Bearer {}",
        "AUTHORIZATION: basic {}",
        '{{"authorization": "Token {}"}}',
        "{{'Authorization': 'Bearer {}', 'Accept': '*/*'}}",
        "('Authorization', 'Bearer {}')",
        "{{b'Authorization': b'Bearer {}'}}",
        r"{{\"Authorization\": \"Bearer {}\"}}",
        "&quot;Authorization&quot;: &quot;Bearer {}&quot;",
        "this key is not known: Bearer {}",
        "x-api-key: {}",
        "OPENAI_API_KEY={}",
        'api_key="{}",',
        "AWS_SECRET_ACCESS_KEY = {}",
        "client_secret: '{}'",
        "https://host/v1?top_k=3&access_token={}&x=1",
        "https://host/v1?key={}",
        "api_key%3D{}",
        "vllm serve model --api-key {} --port 8000",
        "https://user:{}@host:8000/v1?x=1#y",
        r"https:\/\/user:{}@host",
        "redis://:{}@host",
        "postgres://user:{}@host/db and http://other/",
        "https%3A%2F%2Fuser%3A{}%40host%2Fv1",
    ],
)
def test_an_opaque_secret_is_known_by_where_it_stands_and_nothing_else_is_taken(shown: str) -> None:
    for secret in ("9f3ac05b1d7e4a2f8c6b", "dXNlcjpwYXNzd29yZDEyMw"):
        assert redact(shown.format(secret)) == shown.format("***")


def test_a_text_under_the_name_of_a_key_is_a_secret_whatever_it_looks_like() -> None:
    row = {"api_key": "opaque", "openai-api-key": "", "tokens": "two words", "extra": [{"Authorization": "as it is"}]}
    kept = redact_data(row, "a row")
    assert kept == row | {"api_key": "***", "extra": [{"Authorization": "***"}]}


def test_a_password_need_not_be_as_long_or_as_mixed_as_a_key() -> None:
    assert redact("password=hunter22 PGPASSWORD='P@ssword!x'") == "password=*** PGPASSWORD='***'"
    assert redact("ftp://me:pass@word@host/x") == "ftp://me:***@host/x"


def test_a_key_of_wandb_is_known_beside_its_name() -> None:
    key = "0123456789abcdef" * 2 + "0123ABCD"
    assert redact(f"wandb login --relogin {key}") == "wandb login --relogin ***"
    assert find_secrets(f"commit {key}") == []


def test_a_private_key_that_was_cut_goes_as_far_as_it_goes() -> None:
    assert redact(f"-----BEGIN PRIVATE KEY-----\n{MIXED}\n{MIXED}\nand then a text") == "***\nand then a text"
    assert redact(json.dumps([PEM, "a text"])) == '["***", "a text"]'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "***",
        "a task-oriented-dialogue-with-3-turns-and-2-tools, disk-based-2024-index",
        "hf_hub_download(repo_id) of hf_transfer; sk-learn-based-classification-of-2020-data",
        "npm_config_user_agent_and_more, xai-for-explainable-models-2024-survey, jina_embeddings_v2_base_en_2023",
        "token: Optional[str] = None, token=self.tokens[3], api_key=os.environ['OPENAI_API_KEY'], key=lambda k: k",
        "password: str = Field(...), password=getpass.getpass(), The password: swordfish. Secret: nobody knew",
        "tokenizer=Qwen2.5-0.5B-Instruct, eos_token: <|im_end|>, token_ids: [151644, 8948], token: 151645151645",
        "Authorization: required for administrators. authorization = token-based access. bearer of 12 good news items",
        "https://en.wikipedia.org/wiki/User:Me@home and http://host:8000/a?b=c@d, http://user@host, git@github.com:a/b",
        "http://user:***@host Authorization: Bearer *** api_key=***",
        "-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----, all begin by -----BEGIN PRIVATE KEY-----",
        "sha256:9f3ac05b1d7e4a2f8c6b9f3ac05b1d7e4a2f8c6b 550e8400-e29b-41d4-a716-446655440000",
        "ASIAN countries, AKIA, AIzaSy, xoxo-xoxo-xoxo-xoxo, eyJhbGciOiJIUzI1NiJ9 alone",
    ],
)
def test_ordinary_text_is_left_alone_and_is_the_same_object(text: str) -> None:
    assert find_secrets(text) == []
    assert redact(text) is text


def test_values_of_the_environment_are_known_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    value = 'correct horse/"battery"\\stäple&co'
    monkeypatch.setenv("MY_DATABASE_PASSWORD", value)
    forms = (value, quote(value), quote(value, safe="").lower(), json.dumps(value)[1:-1], repr(value)[1:-1])
    for form in forms:
        assert redact(f"it is {form}, twice: {form}.") == "it is ***, twice: ***."
    monkeypatch.delenv("MY_DATABASE_PASSWORD")
    assert redact(value) is value
    monkeypatch.setenv("MY_TOKEN", "correct-horse-\udcff\udc80-battery")  # bytes that are not text
    assert redact("correct-horse") == "correct-horse"


def test_data_is_never_changed_without_a_word_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEFAULT_KEY", "Qwen2.5-7B-Instruct")
    with capture_logs() as told:
        assert [redact_data("by Qwen2.5-7B-Instruct", "a test") for _ in range(3)] == ["by ***"] * 3
    assert [(entry["where"], entry["kind"]) for entry in told] == [("a test", "value of DEFAULT_KEY")]
    with pytest.raises(ConfigError, match=r"policy\.model: this looks like a secret \(value of DEFAULT_KEY\)"):
        load_config(overrides={"policy.model": "Qwen2.5-7B-Instruct"})


def test_a_stream_lets_no_secret_through_however_it_is_written_to() -> None:
    raw = io.BytesIO()
    stream = cast(TextIO, Redacted(io.TextIOWrapper(raw, encoding="ascii", write_through=True)))
    stream.write(f"{JWT}\n")
    stream.writelines([f"{JWT}\n"])
    print(JWT, file=stream)
    click.echo(JWT, file=stream)  # which writes bytes by itself to a stream of ASCII
    assert raw.getvalue() == b"***\n" * 4


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "openai_api_key", "OPENAI_API_KEY_2", "AWS_SECRET", "GOOGLE_CREDENTIALS", "MYSQL_PWD", "X_PAT"]
)
def test_a_variable_is_secret_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "correct-horse-battery")
    assert redact("a correct-horse-battery!") == "a ***!"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "correct-horse-battery"),
        ("KEYBOARD", "correct-horse-battery"),
        ("HF_TOKEN", "short-value"),
        ("HF_TOKEN", "1234567890123"),
        ("HF_TOKEN", "unnecessarily"),
        ("GOOGLE_CREDENTIALS", "/etc/keys/credentials.json"),
        ("SSH_KEY", "~/.ssh/id_ed25519"),
        ("SSH_KEY", "/tmp/9f3ac05b1d7e4a2f8c6b/key"),
    ],
)
def test_other_variables_and_values_that_open_nothing_are_not_secret(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert find_secrets(f"it is {value}.") == []


def test_found_secrets_are_in_order_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKENS["hugging_face"])
    text = f"Authorization: Bearer {TOKENS['hugging_face']} token={JWT} " + " ".join(TOKENS.values())
    found = find_secrets(text)
    assert len(found) == 2 + len(TOKENS)
    assert all(before.end <= after.start for before, after in itertools.pairwise(found))
    assert redact(redact(text)) == redact(text)


HOSTILE = "a hf_ sk- sk-a1 AKIA xoxb- wandb eyJ eyJaaaaaaaa. eyJaaaaaaaa.eyJaaaaaaaa %22 -----BEGIN \\ :// ://a: @://a"
HOSTILE += ' @://a:b %3a%2f%2f %3a%2f%2fa%3a token= token=a1b2c3d4e5f6 token" token&quot;'
PHRASES = ["-----BEGIN PRIVATE KEY-----", "-----BEGIN A PRIVATE KEY-----\nAAAAAAAAAAAAAAAAAAAAA", "password: "]
PHRASES += ["authorization: ", "Authorization: Bearer ", "bearer ", "secret    ="]


@pytest.mark.parametrize("piece", [*HOSTILE.split(), *PHRASES])
def test_hostile_text_takes_linear_time(piece: str) -> None:
    text = "@=%-_ token wandb bearer " + piece * (100_000 // len(piece))
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 5  # a tenth of a second where it is linear, minutes where it is not


@pytest.mark.data
@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not there")
@pytest.mark.parametrize("folder", ["questions", "corpus", "trajectories"])
def test_published_data_gives_no_false_alarm(folder: str) -> None:
    alarms, texts, characters = [], 0, 0
    began = time.process_time()
    for text in _texts(DATA / folder):
        texts, characters = texts + 1, characters + len(text)
        alarms += [(secret.kind, text[max(0, secret.start - 40) : secret.end]) for secret in find_secrets(text)]
    each = (time.process_time() - began) / texts
    print(f"{folder}: {texts} texts of {characters / texts:.0f} characters, {each * 1e6:.0f} us each, reading included")
    assert texts > 1000
    assert alarms == []


def _texts(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.jsonl*")):
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for line in lines:
                yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
