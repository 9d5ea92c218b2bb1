"""grpo sample: the answers of a trained run to one prompt."""

import argparse

from ..paths import path_of
from .common import add_trust, not_negative, positive, quiet


def run(args: list[str]) -> int:
    """Prints the answers, a line or more each."""
    parser = argparse.ArgumentParser(
        prog="grpo sample", description="Answers of a trained run to one prompt."
    )
    parser.add_argument("run", type=path_of, help="a run folder")
    parser.add_argument("prompt", help="a text")
    parser.add_argument(
        "--chat", action="store_true", help="send it as a user's message (default: data.as_chat)"
    )
    parser.add_argument("-n", type=positive, default=4, help="answers (default: 4)")
    parser.add_argument(
        "--temperature", type=not_negative, default=1.0, help="0 is greedy (default: 1)"
    )
    parser.add_argument("--max-tokens", type=positive, help="default: that of the run")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_trust(parser)
    given = parser.parse_args(args)
    quiet()
    from ..export import open_run
    from ..prompts import encode_prompt, to_messages
    from ..rollout import SamplingParams
    from ..sampler import GroupSampler

    config, policy = open_run(given.run, trust_remote_code=given.trust_remote_code)
    prompt = to_messages(given.prompt, given.chat or config.data.as_chat, config.data.system)
    params = SamplingParams(
        temperature=given.temperature,
        max_tokens=given.max_tokens or config.sampling.max_tokens,
        seed=given.seed,
    )
    sampler = GroupSampler(policy.model, policy.tokenizer)
    ids = encode_prompt(policy.tokenizer, prompt, config.data.now)
    for rollout in sampler.generate([ids], given.n, params)[0]:
        print(policy.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True))
    return 0
