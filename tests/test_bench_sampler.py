"""The sampler suite: its models, the truth that its gates hold providers to, and its figures."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import grpo_engine as ge
from bench_fakes import CPU
from grpo_engine.benchmarks import models, sampler_suite, sampling_cases, sampling_problem
from grpo_engine.benchmarks.harness import Case, Row, admit
from grpo_engine.benchmarks.sampler_suite import Shape

TINY = models.MODELS["tiny"]


def small(name: str) -> Case:
    cases = (
        case for shape in sampler_suite.SHAPES["small"] for case in sampler_suite.cases(shape, CPU)
    )
    return next(case for case in cases if case.name == name)


def gate(case: Case, *names: str) -> dict[str, Row]:
    """What the gate finds out about these providers, or about all."""
    chosen = [p for p in case.providers if not names or p.name in names]
    inputs, expected = case.inputs(), case.expected()
    return {p.name: admit(case, p, inputs, expected)[0] for p in chosen}


class Spoiled(ge.GroupSampler):
    """The sampler as it is, or with one thing off; its stats are those of `counted`."""

    spoil: Callable[[list], None] = staticmethod(lambda groups: None)
    counted: dict[str, int] = {}  # noqa: RUF012  replaced by the tests

    def generate(self, *args, **kwargs):
        groups = super().generate(*args, **kwargs)
        self.spoil(groups)
        self.stats |= self.counted
        return groups


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> type[Spoiled]:
    monkeypatch.setattr(sampling_cases, "GroupSampler", Spoiled)
    monkeypatch.setattr(Spoiled, "spoil", staticmethod(lambda groups: None))
    monkeypatch.setattr(Spoiled, "counted", {})
    return Spoiled


def test_models_have_the_sizes_that_their_names_say():
    counts = {n: sum(p.numel() for p in models.build(n).parameters()) for n in ("4m", "135m-4")}
    assert counts["4m"] == pytest.approx(4e6, rel=0.03)
    # SmolLM2-135M has 134,515,008; a layer: four projections, three of the MLP, two norms.
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert counts["135m-4"] + 26 * layer == 134_515_008
    assert models.MODELS["135m"].layers == 30


def test_a_model_is_the_same_every_time_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    one, other = models.build("tiny"), models.build("tiny", "bfloat16")
    assert torch.rand(1) == before
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_bytes_of_a_token_are_those_that_a_cache_holds():
    cache = models.build("tiny", "bfloat16")(input_ids=torch.tensor([[3, 4, 5]])).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert TINY.kv_bytes_per_token("bfloat16") * 3 == held
    assert TINY.kv_bytes_per_token("float32") * 3 == 2 * held


def test_prompts_are_told_apart_and_survive_the_tokenizer():
    prompts = models.random_prompts("tiny", 3, 50)
    assert prompts == models.random_prompts("tiny", 3, 50) and len(set(map(tuple, prompts))) == 3
    assert min(map(min, prompts)) >= 2 and max(map(max, prompts)) < TINY.vocab
    tokenizer = models.make_tokenizer(TINY.vocab)
    assert [tokenizer(models.text_of(p))["input_ids"] for p in prompts] == prompts
    assert tokenizer.decode(prompts[0]) == models.text_of(prompts[0])
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


@pytest.mark.parametrize(
    ("lengths", "slots", "rounds"),
    [
        ([], 2, 0),
        ([3, 1, 2], 1, 6),
        ([3, 1, 2], 8, 3),
        ([3, 1, 2, 2], 2, 5),  # slots end at 3 and 1, then 3 and 3, then 5
        ([1, 1, 4], 2, 5),  # first come, first served, not the best there is
        ([8, 1, 1, 1, 8, 1, 1, 1], 4, 9),  # 16 where a group waits for its longest
    ],
)
def test_the_ideal_is_a_slot_refilled_at_once(lengths, slots, rounds):
    assert sampling_cases.list_schedule(lengths, slots) == rounds


@pytest.mark.parametrize("name", ["generate", "kv", "ragged"])
def test_the_sampler_as_it_is_passes_its_gates(name):
    for row in gate(small(name)).values():
        assert row.status in ("ok", "checked, not timed"), row.note
        assert row.errors["missing"] == 0 and row.errors.get("tokens", 0) == 0


def change_token(groups: list) -> None:
    groups[-1][-1].completion_ids[-1] ^= 1


def lose_token(groups: list) -> None:
    lost = groups[0][1]
    lost.completion_ids.pop()
    lost.logp_sampler = lost.logp_sampler[:-1]


def shift_logp(groups: list) -> None:
    groups[-1][-1].logp_sampler[-1] += 1e-3


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("generate", change_token, "tokens is off by 1 > 0"),
        ("generate", lose_token, "missing is off by 1 > 0"),
        ("generate", shift_logp, "logp_gap is off by 0.001 > 0.0001"),
        ("kv", change_token, "tokens is off by 1 > 0"),
        ("ragged", change_token, "tokens is off by 1 > 0"),
    ],
)
def test_a_sampler_that_is_wrong_is_named(sampler, name, spoil, says):
    sampler.spoil = staticmethod(spoil)
    row = next(iter(gate(small(name), "ours", "ours-1-slots", "ours-4-slots").values()))
    assert row.status == "wrong" and row.note.startswith(says)


def test_in_bfloat16_log_probs_and_lengths_are_held(sampler):
    (case,) = sampler_suite.cases(Shape("generate", "tiny", "bfloat16", 2, 24, 3, 6), CPU)
    rows = gate(case, "ours", "generate")
    assert set(rows["ours"].errors) == {"missing", "logp_gap"}
    assert set(rows["generate"].errors) == {"missing"}
    assert {row.status for row in rows.values()} == {"ok"}
    sampler.spoil = staticmethod(lambda groups: groups[0][0].logp_sampler.sub_(0.5))
    assert gate(case, "ours")["ours"].status == "wrong"


def test_a_peer_that_goes_wrong_is_named(monkeypatch):
    whole = sampling_problem._continued

    def shorter(model: object, ids: torch.Tensor, new: int, **sampling: object) -> torch.Tensor:
        return whole(model, ids, new - (len(ids) > 1), **sampling)  # the truth is made one by one

    monkeypatch.setattr(sampling_problem, "_continued", shorter)
    row = gate(small("generate"), "generate")["generate"]
    assert row.status == "wrong" and row.note.startswith("missing is off by 1 > 0")
    monkeypatch.setattr(
        sampling_problem, "_continued", lambda *a, **k: whole(*a, **k).clamp(max=50)
    )
    case = small("generate")
    expected = case.expected()
    monkeypatch.setattr(sampling_problem, "_continued", lambda *a, **k: whole(*a, **k) ^ 1)
    provider = next(p for p in case.providers if p.name == "generate")
    row, step = admit(case, provider, case.inputs(), expected)
    assert row.status == "wrong" and row.note.startswith("tokens is off") and step is None


def test_bytes_are_compared_with_prompts_held_once_and_repeated(sampler):
    # A token: keys and values of 2 layers, 2 heads of 8 floats: 256 bytes. 24 prompt, 6 new.
    # Pages of 32 tokens: one for the prompt and one for every slot.
    sampler.counted = {"kv_bytes_peak": 256 * 9 * 32}
    rows = gate(small("kv"))
    one, eight = rows["ours-1-slots"].figures, rows["ours-8-slots"].figures
    assert one["kv_mib"] == eight["kv_mib"] == pytest.approx(288 * 256 / 2**20)
    assert one["of_prompt_once"] == pytest.approx(288 / (24 + 6))
    assert eight["of_prompt_once"] == pytest.approx(288 / (24 + 8 * 6))
    assert one["of_repeated"] == eight["of_repeated"] == pytest.approx(288 / (8 * (24 + 6)))
    assert rows["ours-8-slots"].status == "checked, not timed"
    assert rows["ours-1-slots"].note == "pages_beyond is off by 7 > 0"
    sampler.counted = {"kv_bytes_peak": 256 * 9 * 32 + 1}
    assert gate(small("kv"), "ours-8-slots")["ours-8-slots"].status == "wrong"


def test_rounds_are_compared_with_a_count_round_by_round(sampler):
    case = small("ragged")
    lengths = case.inputs().lengths
    waiting, busy, rounds = lengths * 3, [], 0
    while waiting or busy:
        while waiting and len(busy) < 4:
            busy.append(waiting.pop(0))
        busy, rounds = [left - 1 for left in busy if left > 1], rounds + 1
    sampler.counted = {"decode_steps": 2 * rounds}
    (figures,) = (row.figures for row in gate(case).values())
    assert figures == {
        "decode_steps": 2 * rounds,
        "of_ideal": 2.0,
        "ideal": rounds,
        "group_by_group": 3 * max(lengths),
    }
    assert rounds < 3 * max(lengths) and len(set(lengths)) > 2


def test_ragged_lengths_are_lognormal_around_the_median():
    problem = SimpleNamespace(shape=SimpleNamespace(group=4001, new=100))
    lengths = torch.tensor(sampling_problem.Problem.lengths.func(problem)).double()
    assert lengths.median() == pytest.approx(100, rel=0.05)
    assert lengths.log().std() == pytest.approx(0.7, abs=0.05)
    assert lengths.max() == 400 and lengths.min() >= 1
