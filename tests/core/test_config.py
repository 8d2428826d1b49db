from __future__ import annotations

import pytest

from reasonrag.core.config import POLICY_CARD, PRESETS, Config, PolicyCard, copy_card, load_config
from reasonrag.core.errors import ConfigError
from reasonrag.core.settings import Section, dump, identity, parse_assignment, parse_yaml, to_yaml, validate
from reasonrag.online_rl.settings import RLSettings
from reasonrag.retrieval.index import IndexConfig
from reasonrag.retrieval.server import ServeSettings
from reasonrag.training.settings import DPOSettings


def test_defaults_are_those_of_the_paper():
    config = load_config()
    assert (config.value.alpha, config.value.rollouts, config.format.max_steps) == (0.9, 2, 8)
    assert (config.search.iterations, config.search.max_children, config.search.c_uct) == (64, 3, 1.414)
    assert (config.search.selection, config.pairs.min_margin) == ("puct", 0.01)


def test_flags_beat_the_file_and_the_file_beats_the_preset(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("search: {iterations: 5, max_children: 4}\n")
    config = load_config(preset="official", file=file, overrides={"search.iterations": 6})
    assert (config.search.iterations, config.search.max_children, config.search.selection) == (6, 4, "ucb1")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_resolves_and_its_dump_reads_back(preset, tmp_path):
    config = load_config(preset=preset)
    file = tmp_path / "c.yaml"
    file.write_text(dump(config))
    assert load_config(file=file) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"search.iteration": 1}, "unknown key 'search.iteration'; did you mean 'search.iterations'?"),
        ({"serch.iterations": 1}, "unknown key 'serch'; did you mean 'search'?"),
        ({"iterations": 1}, "unknown key 'iterations'; did you mean 'search.iterations'?"),
        ({"api_key_env": "K"}, "did you mean 'judge.api_key_env'"),
        ({"nonsense": 1}, "unknown key 'nonsense'; docs/settings.md has all"),
        ({"policy.api_key_env": "sk-12"}, "policy.api_key_env: not a valid environment variable name"),
        ({"retrieval.backend.key_env": "a key"}, "retrieval.backend.key_env: not a valid environment variable name"),
        ({"value.alpha": 2}, "value.alpha"),
        ({"search.selection": "best"}, "search.selection"),
        ({"pairs.min_margin": float("inf")}, "pairs.min_margin"),
        ({"judge.spec": "http://h/v1"}, "a judge is named, and nothing asks it"),
        ({"pairs.reward": "judge"}, "no judge values the nodes"),
        ({"value.kind": "judge", "pairs.reward": "prm"}, "no prm values the nodes; add --value prm"),
        ({"value.kind": "judge", "pairs.reward": "judge", "pairs.min_confidence": 0.7}, "min_confidence is for SPRE"),
        ({"retrieval.url": "http://h", "retrieval.corpus": "c.jsonl"}, "both a corpus and a retrieval server"),
        ({"policy.spec": "http://user:secret@host/v1"}, "user name or password"),
        ({"retrieval.url": "http://host/v1?top_k=3&api_key=opaque"}, "or a key"),
    ],
)
def test_what_cannot_work_is_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        load_config(overrides=overrides)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


TOKEN = "hf_" + "aB3dE5fG7h" * 4


@pytest.mark.parametrize("model", [Config, DPOSettings, RLSettings, IndexConfig, ServeSettings])
@pytest.mark.parametrize(
    "tree",
    [
        {"policy": {"spec": f"hf:{TOKEN}"}},
        {"policy": {"api_key": TOKEN}},
        {"policy": TOKEN},
        {"retrieval": {"url": ["http://host", "http://user:hunter2@host"]}},
        {"retrieval": {"url": [f"http://host/retrieve?key={TOKEN[3:30]}"]}},
        {"a": {"b": [{TOKEN: 1}]}},
    ],
)
def test_a_secret_anywhere_among_settings_is_refused_and_not_repeated(model: type[Section], tree):
    with pytest.raises(ConfigError, match=r"secret|user name or password") as caught:
        validate(model, tree)
    assert TOKEN[3:30] not in str(caught.value) and "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_secret_is_found_by_its_place_and_told_where_to_go():
    with pytest.raises(ConfigError, match=r"^configuration: policy\.spec: .* environment variable: HF_TOKEN"):
        load_config(overrides={"policy.spec": TOKEN, "policy.top_p": 7})


def test_the_value_of_a_secret_variable_is_refused_too(monkeypatch):
    monkeypatch.setenv("CORPORATE_API_KEY", "correct-horse-battery")
    with pytest.raises(ConfigError, match=r"judge\.model: this looks like a secret"):
        load_config(overrides={"judge.model": "correct-horse-battery"})


@pytest.mark.parametrize("text", ["[1, 2", "- a list", "just text"])
def test_a_file_that_is_no_mapping_is_refused(text, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(file=file)


def test_only_what_can_change_a_result_is_identity():
    changed = {
        "policy.concurrency": 3,
        "policy.spec": "http://elsewhere/v1",
        "pairs.min_margin": 0.2,
        "retrieval.cache": "elsewhere",
        "policy.input_price": 1.0,
    }
    assert identity(load_config(overrides=changed)) == identity(Config())
    for key, value in {"seed": 1, "search.iterations": 3, "policy.temperature": 0.5, "value.alpha": 1.0}.items():
        assert identity(load_config(overrides={key: value})) != identity(Config())


def test_the_demo_policy_acts_on_the_demo_questions_unless_another_is_named():
    demo = load_config(overrides={"questions.dataset": "demo"})
    assert (demo.policy.spec, demo.format.prompts) == ("demo", "brief")
    assert load_config(overrides={"questions.dataset": "demo", "policy.spec": "extractive"}).policy.spec == "extractive"
    assert load_config(overrides={"questions.dataset": "nq"}).policy.spec is None


def test_assignments_are_yaml():
    assert parse_assignment("a.b=[1, x]") == ("a.b", [1, "x"])
    assert parse_assignment("a=[1e-5, 2.5E3, 1e5x, 0.5]") == ("a", [1e-5, 2500.0, "1e5x", 0.5])
    texts = ["010", "12:30", "yes", "1e5", "2026-01-01"]  # of YAML 1.1 these are other values
    assert parse_assignment("a=[010, 12:30, yes, '1e5', 2026-01-01]") == ("a", texts)
    assert parse_yaml(to_yaml(texts)) == texts
    for bad in ("a.b", "a.b=", "=3", "a={"):
        with pytest.raises(ConfigError):
            parse_assignment(bad)


def test_a_policy_that_judges_itself_has_one_price():
    prices = {"policy.input_price": 1.0, "policy.output_price": 2.0, "value.kind": "judge"}
    assert load_config(overrides=prices).prices["judge"].cost(1_000_000, 1_000_000) == 3.0
    other = load_config(overrides=prices | {"judge.spec": "http://h/v1", "judge.model": "m"})
    assert other.prices["judge"].cost(1, 1) is None


def carried(tmp_path, text):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / POLICY_CARD).write_text(text)
    return f"hf:{folder}"


def test_a_policys_folder_says_how_it_is_asked_and_flags_beat_it(tmp_path):
    spec = carried(tmp_path, "format: {prompts: brief}\nretrieval: {top_k: 2, passage_order: best_last}\n")
    config = load_config(overrides={"policy.spec": spec})
    assert (config.format.prompts, config.retrieval.top_k, config.retrieval.passage_order) == ("brief", 2, "best_last")
    assert load_config(preset="paper", overrides={"policy.spec": spec}).retrieval.top_k == 3
    assert load_config(overrides={"policy.spec": spec, "retrieval.top_k": 5}).retrieval.top_k == 5


@pytest.mark.parametrize(
    "text",
    [
        "retrieval: {url: ['http://example.org/retrieve']}",
        "format: {name: 'python:os:system'}",
        "policy: {trust_remote_code: true}",
        "run: {concurrency: 1}",
        "format: brief",
        "- format",
        "format: null",
        "format: {1: a, b: c}",
        "format: {prompts: /etc}",
        "format: {prompts: ../prompts}",
        "retrieval: {top_k: [[[1]]]}",
        "retrieval: " + "[" * 3000,
    ],
)
def test_a_policys_folder_cannot_name_code_or_places(text, tmp_path):
    with pytest.raises(ConfigError, match=POLICY_CARD):
        load_config(overrides={"policy.spec": carried(tmp_path, text)})


def test_a_preset_names_no_split_that_a_file_of_ones_own_lacks():
    assert load_config(preset="demo", overrides={"questions.dataset": "mine.jsonl"}).questions.split is None


def test_the_card_of_a_configuration_reads_back(tmp_path):
    config = load_config(preset="demo", overrides={"retrieval.passage_order": "best_last"})
    again = load_config(
        overrides={"policy.spec": carried(tmp_path, PolicyCard.of(config.model_dump(mode="json")).text)}
    )
    assert (again.format, again.policy.max_tokens) == (config.format, config.policy.max_tokens)
    assert (again.retrieval.top_k, again.retrieval.passage_order) == (1, "best_last")


def test_prompts_of_ones_own_travel_with_the_policy(tmp_path):
    mine = tmp_path / "mine"
    (mine / "reasonrag").mkdir(parents=True)
    (mine / "reasonrag" / "reasoning.txt").write_text("Think.")
    config = load_config(overrides={"format.prompts": str(mine)})
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    PolicyCard.of(config.model_dump(mode="json")).write(first)
    assert copy_card(first, second) and not copy_card(mine, second)
    for folder in (first, second):
        prompts = load_config(overrides={"policy.spec": f"HF:{folder}"}).format.prompts
        assert prompts == str(folder / "prompts") and str(mine) not in (folder / POLICY_CARD).read_text()
        assert (folder / "prompts" / "reasonrag" / "reasoning.txt").read_text() == "Think."


def test_the_resolved_settings_of_a_run_can_be_read_again():
    chosen = {"value.kind": "judge", "judge.spec": "demo-judge", "pairs.reward": "judge"}
    config = load_config(overrides=chosen)
    assert load_config(overrides=config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="min_confidence is for SPRE"):
        load_config(overrides=chosen | {"pairs.min_confidence": 0.7})
