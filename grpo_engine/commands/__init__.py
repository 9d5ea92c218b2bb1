"""The commands of `grpo`, a file each: `run(args) -> int` parses the arguments and does the work.

Errors are raised as UserError or OSError; cli.py prints them.
"""
