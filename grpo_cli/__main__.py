"""`python -m grpo_cli` is the `grpo` command."""

from grpo_cli.cli.app import main

main()
