"""A topology file: what it says, what is refused with which line, and how its engines are laid out."""

from textwrap import dedent

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import ConfigError
from slime.serving.engine_specs import plan_engines, start_waves, with_encoders
from slime.serving.overrides import EmbeddedRules, SglangRules
from slime.serving.topology import GROUP_TYPES, ServedModel, ServerGroup, Topology, single_model
from slime.serving.topology_checks import check_topology
from slime.serving.topology_yaml import Given, read_topology

RULES = SglangRules(None)


def read(tmp_path, text, **given_values):
    path = tmp_path / "topology.yaml"
    path.write_text(dedent(text))
    values = {"model_path": "models/actor", "rules": RULES} | given_values
    return read_topology(path, Given(**values))


def refused(tmp_path, text, **given_values):
    """What the error says, without the folder of the file."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **given_values)
    return str(caught.value).replace(f"{tmp_path}/", "")


COMPLETE = """\
    sglang:
      - name: actor
        num_gpus_per_engine: 2
        server_groups:
          - {worker_type: prefill, num_gpus: 4, overrides: {chunked-prefill-size: 4096}}
          - {worker_type: placeholder, num_gpus: 3}
          - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 4}
          - {worker_type: encoder, num_gpus: 1, num_gpus_per_engine: 1}
      - name: judge
        model_path: models/judge
        engine_groups:
          - worker_type: regular
            num_gpus: 2
            overrides: {mem_fraction_static: 0.5}
      - name: empty
        model_path: models/other
        server_groups: []
    """


def test_a_complete_file_is_read(tmp_path):
    topology, warnings = read(tmp_path, COMPLETE, num_gpus=18)
    assert warnings == []
    actor, judge, empty = topology.models
    assert (actor.model_path, actor.update_weights, actor.is_disaggregated) == ("models/actor", True, True)
    assert (judge.model_path, judge.update_weights, judge.is_disaggregated) == ("models/judge", False, False)
    assert empty.groups == ()
    assert [group.num_engines for group in actor.groups] == [2, 0, 2, 1]
    assert topology.num_gpus == 18
    assert topology.default is actor


def test_engines_take_slots_in_order_and_placeholders_start_nothing(tmp_path):
    topology, _ = read(tmp_path, COMPLETE)
    specs = plan_engines(topology, first_gpu=8)
    assert [(spec.name, spec.first_gpu, spec.num_gpus) for spec in specs] == [
        ("actor/prefill-0", 8, 2),
        ("actor/prefill-1", 10, 2),
        ("actor/decode-0", 15, 4),
        ("actor/decode-1", 19, 4),
        ("actor/encoder-0", 23, 1),
        ("judge/regular-0", 24, 1),
        ("judge/regular-1", 25, 1),
    ]
    assert [spec.ordinal for spec in specs] == list(range(7))
    assert [spec.model_path for spec in specs] == ["models/actor"] * 5 + ["models/judge"] * 2
    assert specs[5].settings == {"mem_fraction_static": 0.5}


def test_settings_follow_from_the_kind_and_overrides_win(tmp_path):
    text = COMPLETE.replace("chunked-prefill-size: 4096", "load_balance_method: auto")
    specs = {spec.name: spec for spec in plan_engines(read(tmp_path, text)[0])}
    fields = {"load_balance_method", "prefill_round_robin_balance", "enable_hierarchical_cache"}
    assert specs["actor/prefill-0"].settings_for(fields) == {
        "disaggregation_mode": "prefill",
        "load_balance_method": "auto",
    }
    decode = specs["actor/decode-0"]
    assert decode.settings_for(fields) == {
        "disaggregation_mode": "decode",
        "prefill_round_robin_balance": True,
        "enable_hierarchical_cache": False,
    }
    assert decode.settings_for(()) == {"disaggregation_mode": "decode"}
    assert specs["actor/encoder-0"].settings_for(fields) == {"encoder_only": True}


def test_encoders_start_first_and_those_who_ask_them_get_their_urls(tmp_path):
    specs = plan_engines(read(tmp_path, COMPLETE)[0])
    first, second = start_waves(specs)
    assert [spec.name for spec in first] == ["actor/encoder-0"]
    encoders = [spec.endpoint(f"http://host:{n}", "sglang") for n, spec in enumerate(first, 9000)]
    told = {spec.name: with_encoders(spec, encoders).settings for spec in second}
    assert told["actor/prefill-0"]["encoder_urls"] == ["http://host:9000"]
    assert told["actor/prefill-0"]["language_only"] is True
    for name in ("actor/decode-0", "judge/regular-0"):
        assert "encoder_urls" not in told[name]
    assert encoders[0].updates_weights is False


def test_all_problems_of_a_file_are_told_together_each_with_its_line(tmp_path):
    text = """\
    sglang:
      - name: actor
        server_groups:
          - worker_type: regulr
            num_gpus: 0
          - worker_type: regular
            num_gpus: 3
            num_gpus_per_engine: 2
            overrides: {tp-size: 2, port: 1}
      - name: actor
        modell: x
        server_groups:
          - {worker_type: prefill, num_gpus: 1}
          - {num_gpus: 1}
    more: 1
    """
    told = refused(tmp_path, text)
    for expected in (
        "topology.yaml:4: worker_type is 'regulr'",
        "topology.yaml:5: num_gpus must be a whole number above 0, got 0",
        "topology.yaml:7: 3 GPUs do not divide into engines of 2",
        "topology.yaml:9: tp-size: is not for overrides: give --rollout-num-gpus-per-engine",
        "topology.yaml:9: port: is not for overrides",
        "topology.yaml:10: the name 'actor' is taken",
        "topology.yaml:11: unknown key 'modell' in a model\n    remedy: did you mean 'model_path'?",
        "topology.yaml:13: prefill needs somebody who decodes",
        "topology.yaml:14: a server group needs `worker_type`",
        "topology.yaml:15: unknown key 'more' in the file",
    ):
        assert expected in told
    assert "(10 problems)" in told


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("{worker_type: placeholder, num_gpus: 1, overrides: {a: 1}}", "overrides means nothing"),
        ("{worker_type: regular, num_gpus: true}", "must be a whole number above 0, got True"),
        ("{worker_type: regular, num_gpus: 1, num_gpus: 2}", "num_gpus is said twice"),
        ("{worker_type: regular, num_gpus: 1, overrides: {a-b: 1, a_b: 2}}", "a_b is said twice"),
        ("{worker_type: regular, num_gpus: 1, overrides: [a]}", "overrides must be a mapping"),
        ("{worker_type: regular, num_gpus: 1, overrides: {disaggregation_mode: x}}", "worker_type says it"),
        ("{worker_type: encoder, num_gpus: 1}", "encoder needs somebody who asks it"),
        ("{worker_type: decode, num_gpus: 1}", "decode needs somebody who prefills"),
        ("7", "a server group must be a mapping"),
    ],
)
def test_a_group_that_cannot_be_is_refused(tmp_path, group, message):
    text = f"sglang:\n  - name: actor\n    server_groups:\n      - {group}\n"
    told = refused(tmp_path, text)
    assert message in told
    assert "topology.yaml:4:" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("sglang: [", "is not YAML"),
        ("models: []", "unknown key 'models'"),
        ("sglang: {}", "sglang must be a list"),
        ("sglang: []", "names no model"),
        ("sglang: [{server_groups: []}]", "a model needs `name`"),
        ("sglang: [{name: a/b, server_groups: []}]", "'a/b' is no name"),
        ("sglang: [{name: a}]", "a has no server_groups"),
        ("sglang: [{name: a, server_groups: [], engine_groups: []}]", "is the same as server_groups"),
        ("sglang: [{name: a, server_groups: [], update_weights: 1}]", "must be true or false, got 1"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    assert message in refused(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot read: No such file"):
        read_topology(tmp_path / "nowhere.yaml", Given(model_path="m", rules=RULES))


def test_regular_servers_beside_prefill_and_decode_are_refused(tmp_path):
    groups = [{"worker_type": kind, "num_gpus": 1} for kind in ("regular", "prefill", "decode")]
    text = yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]})
    assert "takes no regular ones" in refused(tmp_path, text)


def test_anchors_and_merges_are_followed(tmp_path):
    text = """\
    sglang:
      - name: actor
        server_groups:
          - &base {worker_type: regular, num_gpus: 2}
          - {<<: *base, num_gpus: 4}
    """
    groups = read(tmp_path, text)[0].models[0].groups
    assert [group.num_gpus for group in groups] == [2, 4]


def test_null_stands_for_the_default(tmp_path):
    text = "sglang: [{name: a, model_path: null, update_weights: ~, server_groups: []}]"
    model = read(tmp_path, text)[0].models[0]
    assert (model.model_path, model.update_weights) == ("models/actor", True)


def test_the_groups_must_add_up_to_the_flag(tmp_path):
    told = refused(tmp_path, COMPLETE, num_gpus=17)
    assert "the groups take 18 GPUs, and --rollout-num-gpus is 17" in told


def group_with_path(path):
    return {"worker_type": "regular", "num_gpus": 1, "overrides": {"model_path": path} if path else {}}


@pytest.mark.parametrize(
    ("own", "paths", "result"),
    [
        (None, ["models/b", "models/b/"], "models/b"),
        ("models/b", ["models/b", None], "models/b"),
        ("models/b", ["models/c"], "'models/c' is not the model_path of m, 'models/b'"),
        (None, ["models/b", "models/c"], "'models/c' is not the model_path of m, 'models/b'"),
        (None, ["models/b", None], "only some groups of m have this model_path"),
        (None, ["models/actor", None], "models/actor"),
    ],
)
def test_groups_of_a_model_serve_one_folder(tmp_path, own, paths, result):
    model = {"name": "m", "update_weights": True, "server_groups": [group_with_path(path) for path in paths]}
    model |= {"model_path": own} if own else {}
    text = yaml.safe_dump({"sglang": [model]})
    if " " in result:
        assert result in refused(tmp_path, text)
        return
    topology, _ = read(tmp_path, text)
    assert topology.models[0].model_path == result
    assert all("model_path" not in spec.settings for spec in plan_engines(topology))


def test_without_a_model_path_anywhere_it_is_asked_for(tmp_path):
    text = "sglang: [{name: a, server_groups: []}]"
    assert "a has no model_path" in refused(tmp_path, text, model_path=None, trains=False)


def test_weights_go_to_every_model_that_takes_them_and_doubts_are_told(tmp_path):
    text = """\
    sglang:
      - {name: actor, server_groups: []}
      - {name: twin, model_path: models/actor/, server_groups: []}
      - {name: other, model_path: models/other, update_weights: true, server_groups: []}
      - {name: frozen, update_weights: false, server_groups: []}
    """
    topology, warnings = read(tmp_path, text)
    assert [model.update_weights for model in topology.models] == [True, True, True, False]
    (warning,) = warnings
    assert warning.flag.endswith(":4")
    assert "other serves 'models/other', and gets the weights of 'models/actor'" in warning.message


def test_a_run_that_trains_must_update_a_model_and_is_warned_if_not_the_first(tmp_path):
    judge = "sglang: [{name: judge, model_path: models/judge, server_groups: []}]"
    assert "no model takes the trainer's weights" in refused(tmp_path, judge)
    assert read(tmp_path, judge, trains=False)[1] == []
    text = judge.replace("]}]", "]}, {name: actor, server_groups: []}]")
    _, (warning,) = read(tmp_path, text)
    assert "rollouts ask judge by default" in warning.message


def test_the_embedded_engine_takes_its_own_settings_only(tmp_path):
    groups = [
        {"worker_type": "regular", "num_gpus": 2, "overrides": {"max_running_requests": 3, "tp_size": 1}},
        {"worker_type": "prefill", "num_gpus": 1},
        {"worker_type": "decode", "num_gpus": 2, "num_gpus_per_engine": 2},
        {"worker_type": "placeholder", "num_gpus": 1},
    ]
    text = yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]})
    told = refused(tmp_path, text, rules=EmbeddedRules())
    assert "tp_size: is no setting of the embedded engine" in told
    assert "the embedded engine knows no prefill servers" in told
    assert "an embedded engine takes one slot, not 2" in told
    rules = EmbeddedRules()
    assert rules.setting("max_running_requests", 3) is None
    assert rules.setting("max_running_requests", "many")[0].startswith("expects a whole number")
    assert rules.setting("port", 1)[0] == "is given by slime"


def test_the_shortcut_of_prefill_servers():
    topology = single_model("m", num_gpus=8, num_gpus_per_engine=2, prefill_engines=1)
    assert [spec.name for spec in plan_engines(topology)] == [
        "default/prefill-0",
        "default/decode-0",
        "default/decode-1",
        "default/decode-2",
    ]
    assert single_model("m", num_gpus=0).models[0].groups == ()


@st.composite
def topologies(draw):
    models = []
    for number in range(draw(st.integers(1, 3))):
        groups = []
        for kind in draw(st.lists(st.sampled_from(GROUP_TYPES), max_size=4)):
            size, count = draw(st.integers(1, 4)), draw(st.integers(1, 3))
            groups.append(ServerGroup(worker_type=kind, num_gpus=size * count, num_gpus_per_engine=size))
        models.append(ServedModel(name=f"m{number}", model_path="p", groups=tuple(groups)))
    return Topology(models=tuple(models))


@given(topologies(), st.integers(0, 9))
def test_no_two_engines_share_a_slot_and_every_slot_is_somebodys(topology, first):
    specs = plan_engines(topology, first_gpu=first)
    slots = [slot for spec in specs for slot in range(spec.first_gpu, spec.first_gpu + spec.num_gpus)]
    kept = sum(g.num_gpus for m in topology.models for g in m.groups if g.worker_type == "placeholder")
    assert len(slots) == len(set(slots)) == topology.num_gpus - kept
    assert slots == sorted(slots)
    assert all(first <= slot < first + topology.num_gpus for slot in slots)
    assert len({spec.name for spec in specs}) == len(specs) == topology.num_engines
    assert [spec for wave in start_waves(specs) for spec in wave] == sorted(
        specs, key=lambda spec: (spec.worker_type != "encoder", spec.ordinal)
    )


@given(topology=topologies())
def test_what_is_written_is_read_back(topology, tmp_path_factory):
    content = {
        "sglang": [
            {
                "name": model.name,
                "model_path": model.model_path,
                "update_weights": True,
                "server_groups": [
                    {"worker_type": group.worker_type, "num_gpus": group.num_gpus}
                    | (
                        {}
                        if group.worker_type == "placeholder"
                        else {"num_gpus_per_engine": group.num_gpus_per_engine}
                    )
                    for group in model.groups
                ],
            }
            for model in topology.models
        ]
    }
    path = tmp_path_factory.mktemp("topology") / "t.yaml"
    path.write_text(yaml.safe_dump(content))
    given_values = Given(model_path="p", rules=RULES)
    if check_topology(topology, trains=True, counted=(None, "")):
        with pytest.raises(ConfigError, match=r"needs somebody|takes no regular ones"):
            read_topology(path, given_values)
        return
    read_back, _ = read_topology(path, given_values)
    assert [spec.name for spec in plan_engines(read_back)] == [spec.name for spec in plan_engines(topology)]
