"""The rewards exact, fuzzy and format, and what all built-ins have in common."""

import ast
import inspect
from pathlib import Path

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards import builtin
from grpo_engine.rewards.builtin import BUILTIN, exact, for_trl, format, fuzzy, text_of

R1 = r"<think>.+</think>\s*<answer>.+</answer>"


def chat(text: str) -> list[dict]:
    return [{"role": "assistant", "content": "first"}, {"role": "assistant", "content": text}]


def test_text_of_takes_the_last_message():
    assert text_of("a") == "a"
    assert text_of(chat("b")) == "b"


def test_exact_leaves_out_white_space_at_the_ends_alone():
    completions = [" 42\n", "4 2", chat("42"), "", "42 42"]
    assert exact(completions, [42] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_fuzzy_is_twice_the_matches_over_all_characters():
    # bcd matches: 2 * 3 / 8. Then equal but for case and blanks, nothing in common, empty.
    completions = ["bcde", chat(" ABcd\n"), "xyz", ""]
    assert fuzzy(completions, ["abcd"] * 4) == [0.75, 1.0, 0.0, 0.0]
    assert fuzzy(["New   York"], ["new york"]) == [1.0]


def test_fuzzy_does_not_take_frequent_letters_for_junk():
    # difflib's heuristic drops letters that are frequent in texts of 200 and more.
    assert fuzzy(["b" + "a" * 300], ["a" * 300]) == [pytest.approx(2 * 300 / 601)]


def test_fuzzy_with_a_threshold_is_one_from_there_on():
    assert fuzzy(["bcde", "abcd", "xyz"], ["abcd"] * 3, threshold=0.75) == [1.0, 1.0, 0.0]
    assert fuzzy(["bcde"], ["abcd"], threshold=0.76) == [0.0]


def test_format_matches_the_whole_text_over_line_ends():
    completions = [
        "<think>a\nb</think>\n<answer>4</answer>",
        chat("<think>a</think><answer>4</answer>"),
        "<think>a</think><answer>4</answer> and more",
        "so <think>a</think><answer>4</answer>",
        "",
    ]
    assert format(completions, pattern=R1) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_format_of_the_raw_completion_sees_special_tokens():
    raw = ["4<eos>", "4"]
    assert format(["4", "4"], raw, pattern="4<eos>", source="raw_completions") == [1.0, 0.0]


def test_format_with_the_prompts_tail_finds_a_prefilled_tag():
    tails = ["Question?\n<think>", "Question?\n", "<think>x</think><answer>1</answer>"]
    completions = ["a</think><answer>4</answer>", "a</think><answer>4</answer>", " no"]
    assert format(completions, pattern=R1) == [0.0, 0.0, 0.0]
    options = {"pattern": R1, "source": "with_prompt_tail"}
    assert format(completions, prompt_tail=tails, **options) == [1.0, 0.0, 0.0]
    whole = ["<think>a</think><answer>4</answer>"]
    assert format(whole, prompt_tail=["Question?\n"], **options) == [1.0]
    anchored = {**options, "pattern": f"^{R1}$"}
    assert format(completions, prompt_tail=tails, **anchored) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("source", ["raw_completions", "with_prompt_tail"])
def test_format_without_the_argument_it_was_told_to_read(source):
    with pytest.raises(UserError, match=f"format: source {source} needs the argument"):
        format(["a"], pattern="a", source=source)


BAD = [
    ("fuzzy", {"threshold": 0}, "threshold must be null, or above 0 and at most 1; given 0"),
    ("fuzzy", {"threshold": 1.5}, "threshold must be"),
    ("fuzzy", {"threshold": "0.5"}, "threshold must be"),
    ("fuzzy", {"threshold": True}, "threshold must be"),
    ("format", {"pattern": "("}, r"pattern must be a regular expression; given '\('"),
    ("format", {"pattern": 3}, "pattern must be a regular expression"),
    ("format", {"pattern": "a", "source": "ids"}, "source must be one of completions, raw_comp"),
    ("math", {"near": -0.1}, "near must be between 0 and 1; given -0.1"),
    ("math", {"near_tolerance": 0}, "near_tolerance must be above 0 and below 1"),
    ("math", {"format_credit": 2}, "format_credit must be between 0 and 1"),
    ("math", {"near": 0.6, "format_credit": 0.5}, r"near \+ format_credit must be below 1"),
    ("length_penalty", {"target": 5, "most": 5}, r"most must be above target \(5\); given 5"),
    ("length_penalty", {"target": -1, "most": 5}, "target must be an integer of at least 0"),
    ("length_penalty", {"target": 1.5, "most": 5}, "target must be an integer"),
    ("length_normalized", {"compare": "fuzzy"}, "compare must be one of math, exact"),
    ("soft_overlong", {"max_length": 8, "buffer": 0}, "buffer must be an integer of at least 1"),
    ("soft_overlong", {"max_length": 8, "buffer": 9}, r"buffer must be at most max_length \(8\)"),
    ("soft_overlong", {"max_length": 0, "buffer": 1}, "max_length must be an integer of at least"),
    ("repetition", {"ngram": 0}, "ngram must be an integer of at least 1"),
    ("repetition", {"most": 0}, "most must be a number above 0"),
    ("repetition", {"most": float("nan")}, "most must be a number above 0"),
    ("reasoning_gym", {"partial": 1}, "partial must be true or false"),
    ("python_tests", {"timeout_s": 0}, "timeout_s must be a number above 0"),
    ("python_tests", {"memory_mib": 8}, "memory_mib must be an integer of at least 64"),
    ("python_tests", {"partial": "yes"}, "partial must be true or false"),
    ("python_tests", {"workers": 0}, "workers must be an integer of at least 1"),
    ("reward_model", {"path": "/no/such"}, "path must be a folder with a config.json"),
    ("reward_model", {"path": "/no/such", "batch_size": 0}, "batch_size must be an integer"),
    ("reward_model", {"path": "/no/such", "dtype": "int8"}, "dtype must be one of float32, bf"),
    ("reward_model", {"path": "/no/such", "label": -1}, "label must be an integer of at least 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_an_option_out_of_range_is_refused_by_name_without_a_completion(name, options, message):
    lists = {
        n: []
        for n, p in inspect.signature(BUILTIN[name]).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    with pytest.raises(UserError, match=f"^rewards: {name}: {message}"):
        BUILTIN[name](**lists, **options)


def test_importing_the_built_ins_imports_nothing_heavy():
    # Reward workers are light processes; what a reward needs comes when it is called.
    folder = Path(builtin.__file__).parent
    allowed = set(
        "_thread ast builtins collections concurrent ctypes dataclasses decimal difflib fractions "
        "functools importlib inspect itertools json math os pathlib python_plain re resource "
        "select signal subprocess sys tempfile threading time types typing".split()
    )
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {n.partition(".")[0] for n in names} <= allowed, file


def test_a_built_in_serves_trl_which_passes_more_than_it_names():
    everything = {
        "prompts": ["1+1=", "2+2="],
        "completions": [chat("2"), chat("5")],
        "completion_ids": [[1], [2]],
        "answer": ["2", "4"],
        "gold": ["0", "5"],
        "trainer_state": None,
        "log_metric": print,
    }
    assert for_trl(exact)(**everything) == [1.0, 0.0]
    assert for_trl(exact, answer_column="gold")(**everything) == [0.0, 1.0]
    assert for_trl(fuzzy, threshold=0.5)(**everything) == [1.0, 0.0]
    assert for_trl(format, pattern="[0-4]").__name__ == "format"
    assert for_trl(format, pattern="[0-4]")(**everything) == [1.0, 0.0]
    with pytest.raises(UserError, match="the reward exact needs the argument 'answers'"):
        for_trl(exact, answer_column="none")(**everything)
    with pytest.raises(TypeError, match="nera"):
        for_trl(fuzzy, nera=1)
