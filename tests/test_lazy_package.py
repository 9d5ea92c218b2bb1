"""`import grpo_engine` brings nothing; each name brings what it needs when it is used."""

import subprocess
import sys
import textwrap

import pytest

import grpo_engine as ge

LIGHT = {"GRPOOptions", "UserError"}  # options and errors are plain Python


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_its_options_and_its_errors_need_no_torch():
    code = (
        "import sys, grpo_engine as ge; [getattr(ge, n) for n in {names}];"
        "print('torch' in sys.modules)"
    )
    assert run(code.format(names=sorted(LIGHT))) == "False"
    assert run(code.format(names=["grpo_loss"])) == "True"


def test_public_names_are_seen_before_they_are_used():
    seen = run("import grpo_engine as ge; print(*sorted(set(dir(ge)) & set(ge.__all__)))").split()
    assert seen == sorted(ge.__all__)


@pytest.mark.parametrize("name", ge.__all__)
def test_every_name_is_the_one_of_its_module(name):
    value = getattr(ge, name)
    assert getattr(sys.modules[value.__module__], name) is value


def test_importing_the_package_imports_torch_and_nothing_optional():
    script = """
        import sys, torch
        before = set(sys.modules)
        import grpo_engine as ge
        ge.GRPOOptions(), ge.grpo_loss, ge.pack_groups, ge.SamplingParams()
        print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    optional = "transformers peft triton pyarrow bitsandbytes datasets rich jsonargparse tokenizers"
    assert "grpo_engine" in done.stdout.split()
    assert not set(optional.split()) & set(done.stdout.split())


@pytest.mark.parametrize("use", ["ge.GroupSampler", "ge.pack_groups([1], [1], [0, 1], 8)"])
def test_without_the_extension_one_line_says_what_to_run(use):
    # None stands for a module that can't be found.
    code = f"import sys; sys.modules['grpo_engine._C'] = None; import grpo_engine as ge; {use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *_, last = done.stderr.strip().splitlines()
    folder = ge.__path__[0]
    assert last.startswith("grpo_engine.errors.UserError: the C++ extension is not built in")
    assert f"{folder}: run pip install -e . in" in last


def test_every_public_name_can_be_imported_and_an_unknown_one_cannot():
    for name in ge.__all__:
        assert getattr(ge, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ge.no_such_name
