"""The loss types, and the options without which some of them are refused."""

CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
LOSSES = [*CLIPPED, "cispo", "sapo", "vespo"]
NEEDED = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 16}}
